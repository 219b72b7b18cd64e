"""Stock clients of OpenAI and Anthropic over `HoldingTransport`: routers are lost at any frame; nobody can tell."""

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anthropic
import httpx2
import openai
import pytest

from holdfast import HoldingTransport
from holdfast.cluster.client.held_call import HeldCall, error_event
from holdfast.cluster.client.retry_policy import RetryPolicy
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import StaticDirectory
from holdfast.router.router import Router
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.doors.http.test_openai_sdk import HELLO, RENDERED, TEMPLATE, text_of
from tests.router.site import eventually

MARK = b": held "
NUM_TOKENS = 7


@dataclass
class Cutter:
    """A TCP proxy that breaks connections off where it is told: after so many marks, and some bytes."""

    target: str
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """Of the next connections that carry a stream, one each."""
    num_cut: int = 0
    refuses: bool = False

    async def start(self) -> "Cutter":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._tasks = set()
        return self

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        host, port = self.target.split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        both = writer, far_writer
        for work in (self._up(reader, far_writer), self._down(far_reader, writer, both)):
            self._tasks.add(asyncio.create_task(work))

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)
        writer.close()

    async def _down(self, reader, writer, both) -> None:
        seen, sent, cut = b"", 0, None
        while data := await reader.read(2**16):
            seen += data
            if cut is None and self.cuts and b"text/event-stream" in seen:
                cut = self.cuts.pop(0)
            if cut is not None and (at := place_of(seen, *cut)) is not None:
                writer.write(seen[sent:at])
                await writer.drain()
                self.num_cut += 1
                await asyncio.sleep(0.005)  # what was written arrives before the end
                for one in both:
                    one.transport.abort()
                return
            writer.write(data)
            sent = len(seen)
        writer.close()


def place_of(seen: bytes, num_marks: int, num_bytes: int) -> int | None:
    """Where a stream is cut; None if it has not come so far."""
    at = 0
    for _ in range(num_marks):
        at = seen.find(MARK, at)
        if at < 0:
            return None
        at = seen.find(b"\n\n", at) + 2
        if at == 1:
            return None
    return at + num_bytes if len(seen) >= at + num_bytes else None


@dataclass
class Two:
    """Two routers, each behind a cutter and with a replica of its own: all replicas answer the same."""

    replicas: list[FakeReplica]
    routers: list[Router]
    cutters: list[Cutter]

    @property
    def addresses(self) -> list[str]:
        return [cutter.address for cutter in self.cutters]

    def cut(self, *cuts: tuple[int, int]) -> None:
        """The streams that come next, whichever router they come to."""
        shared = list(cuts)
        for cutter in self.cutters:
            cutter.cuts = shared

    @property
    def num_cut(self) -> int:
        return sum(cutter.num_cut for cutter in self.cutters)

    def transport(self, **options) -> HoldingTransport:
        return HoldingTransport(self.addresses, draw=lambda: 0.0, verify=False, **options)


@asynccontextmanager
async def two_routers(step_s: float = 0.002) -> AsyncIterator[Two]:
    replicas = [await FakeReplica.start(name, step_s=step_s) for name in ("one", "two")]
    routers, cutters = [], []
    for replica in replicas:
        router = await Router.start(
            RouterConfig(max_reconnect_s=0.1),
            LimitsConfig(),
            StaticDirectory([replica.endpoint]),
            load_tokenizer=lambda path: byte_tokenizer(path, TEMPLATE),
            http_port=0,
        )
        routers.append(router)
        cutters.append(await Cutter(router.http_address).start())
    await eventually(lambda: _are_up(routers))
    try:
        yield Two(replicas, routers, cutters)
        await eventually(lambda: _is_idle(routers))
    finally:
        for cutter in cutters:
            await cutter.stop()
        for router in routers:
            await router.stop()
        for replica in replicas:
            await replica.kill()


async def _are_up(routers: list[Router]) -> bool:
    async with httpx2.AsyncClient(verify=False) as client:
        return all([(await client.get(f"http://{one.http_address}/health")).is_success for one in routers])


async def _is_idle(routers: list[Router]) -> bool:
    return not any(router.num_open for router in routers)


def openai_client(place: Two, transport: HoldingTransport) -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(base_url=f"http://{place.addresses[0]}/v1", api_key="x", max_retries=0, http_client=http)


async def chat(place: Two, transport: HoldingTransport) -> tuple[str, dict]:
    async with openai_client(place, transport) as client:
        stream = await client.chat.completions.create(
            model="fake",
            messages=HELLO,
            seed=5,
            n=2,
            max_tokens=NUM_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "|".join("".join(one.delta.content or "" for one in choices if one.index == index) for index in (0, 1))
    assert (len({one.id for one in chunks}), len({one.created for one in chunks})) == (1, 1)
    usage = chunks[-1].usage
    return text, {
        "roles": [one.index for one in choices if one.delta.role],
        "ends": sorted((one.index, one.finish_reason) for one in choices if one.finish_reason),
        "usage": (usage.prompt_tokens, usage.completion_tokens),
    }


async def completion(place: Two, transport: HoldingTransport) -> tuple[str, dict]:
    async with openai_client(place, transport) as client:
        stream = await client.completions.create(
            model="fake", prompt=["hello", "you"], seed=5, max_tokens=NUM_TOKENS, echo=True, stream=True, logprobs=None
        )
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks]
    text = "|".join("".join(one.text for one in choices if one.index == index) for index in (0, 1))
    assert len({one.id for one in chunks}) == 1
    return text, {"ends": sorted((one.index, one.finish_reason) for one in choices if one.finish_reason)}


async def response(place: Two, transport: HoldingTransport) -> tuple[str, dict]:
    async with openai_client(place, transport) as client:
        stream = await client.responses.create(
            model="fake", input="hello", max_output_tokens=NUM_TOKENS, stream=True, extra_body={"seed": 5}
        )
        events = [event async for event in stream]
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert events[-1].response.output_text == text
    kinds = [one.type for one in events if one.type != "response.output_text.delta"]
    return text, {"kinds": kinds, "usage": events[-1].response.usage.output_tokens}


async def message(place: Two, transport: HoldingTransport) -> tuple[str, dict]:
    http = httpx2.AsyncClient(transport=transport)
    url = f"http://{place.addresses[0]}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0, http_client=http) as client:
        asked = {"model": "fake", "max_tokens": NUM_TOKENS, "messages": HELLO, "extra_body": {"seed": 5}}
        events = [event async for event in await client.messages.create(stream=True, **asked)]
    text = "".join(one.delta.text for one in events if one.type == "content_block_delta")
    kinds = [one.type for one in events if one.type != "content_block_delta"]
    return text, {"kinds": kinds, "usage": events[-2].usage.output_tokens}


DOORS = {
    chat: "|".join(text_of(RENDERED, seed, NUM_TOKENS) for seed in (5, 6)),
    completion: "|".join(prompt + text_of(prompt.encode(), 5, NUM_TOKENS) for prompt in ("hello", "you")),
    response: text_of(RENDERED, 5, NUM_TOKENS),
    message: text_of(RENDERED, 5, NUM_TOKENS),
}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
@on_a_loop
async def test_a_stream_that_is_cut_at_any_frame_goes_on(door):
    async with two_routers() as place:
        whole = await door(place, place.transport())
        assert whole[0] == DOORS[door]
        cuts = [(num_marks, num_bytes) for num_marks in range(NUM_TOKENS) for num_bytes in (0, 1 + 37 * num_marks)]
        for cut in cuts:
            place.cut(cut)
            assert await door(place, place.transport()) == whole, cut
        assert place.num_cut >= len(cuts) // 2


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
@on_a_loop
async def test_a_stream_that_is_cut_again_and_again_goes_on(door):
    async with two_routers() as place:
        whole = await door(place, place.transport())
        place.cut(*[(1, 3)] * 30)
        assert await door(place, place.transport()) == whole
        assert place.num_cut >= 3


@on_a_loop
async def test_a_blocking_client_goes_on_and_so_does_one_that_reads_in_thoughts():
    def ask(address: str, transport: HoldingTransport) -> str:
        with httpx2.Client(transport=transport) as http:
            client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=0, http_client=http)
            stream = client.chat.completions.create(
                model="fake", messages=HELLO, seed=5, max_tokens=NUM_TOKENS, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async with two_routers() as place:
        for num_marks in range(NUM_TOKENS):
            place.cut((num_marks, 5))
            assert await asyncio.to_thread(ask, place.addresses[0], place.transport()) == text_of(
                RENDERED, 5, NUM_TOKENS
            )
        assert place.num_cut


@on_a_loop
async def test_httpx_before_2_is_served_as_well():
    httpx = importlib.import_module("httpx")

    def ask(address: str, transport: HoldingTransport) -> str:
        with httpx.Client(transport=transport) as http:
            client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=0, http_client=http)
            stream = client.chat.completions.create(
                model="fake", messages=HELLO, seed=5, max_tokens=NUM_TOKENS, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async with two_routers() as place:
        place.cut((2, 5))
        assert await asyncio.to_thread(ask, place.addresses[0], place.transport()) == text_of(RENDERED, 5, NUM_TOKENS)
        assert place.num_cut == 1


@on_a_loop
async def test_a_stream_without_a_seed_goes_on_with_the_tokens_that_it_had():
    async with two_routers() as place:
        place.cut((3, 0))
        async with openai_client(place, place.transport()) as client:
            stream = await client.chat.completions.create(
                model="fake", messages=HELLO, max_tokens=NUM_TOKENS, stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    first, second = (replica.submits[0] for replica in place.replicas)
    assert first.sampling_params.seed == second.sampling_params.seed
    assert text == text_of(RENDERED, first.sampling_params.seed, NUM_TOKENS)
    assert place.num_cut == 1


@on_a_loop
async def test_a_router_that_stops_hands_its_streams_over():
    async with two_routers(step_s=0.01) as place, openai_client(place, place.transport()) as client:
        whole = asyncio.create_task(client.chat.completions.create(model="fake", messages=HELLO, seed=6, max_tokens=60))
        stream = await client.chat.completions.create(model="fake", messages=HELLO, seed=5, max_tokens=60, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if len(text) == 5:
                stopping = asyncio.create_task(place.routers[0].stop(hands_over=True))
        assert (await whole).choices[0].message.content == text_of(RENDERED, 6, 60)
        await stopping
    assert text == text_of(RENDERED, 5, 60)


@on_a_loop
async def test_the_whole_cluster_may_be_away_for_a_while():
    async with two_routers() as place:
        place.cut((3, 0))
        async with openai_client(place, place.transport()) as client:
            stream = await client.chat.completions.create(
                model="fake", messages=HELLO, seed=5, max_tokens=NUM_TOKENS, stream=True
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if len(text) == 2:
                    place.cutters[0].refuses = place.cutters[1].refuses = True
                    asyncio.get_running_loop().call_later(0.2, come_back, place)
    assert text == text_of(RENDERED, 5, NUM_TOKENS)


def come_back(place: Two) -> None:
    for cutter in place.cutters:
        cutter.refuses = False


@on_a_loop
async def test_it_gives_up_after_its_time_as_the_package_would():
    async with two_routers() as place:
        for cutter in place.cutters:
            cutter.refuses = True
        async with openai_client(place, place.transport(connect_s=0.1, reconnect_s=0.3)) as client:
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=3)
            come_back(place)
            place.cut((2, 0))
            stream = await client.chat.completions.create(
                model="fake", messages=HELLO, seed=5, max_tokens=NUM_TOKENS, stream=True
            )
            with pytest.raises((httpx2.RemoteProtocolError, httpx2.NetworkError, openai.APIConnectionError)):
                await read_and_refuse(place, stream)
            come_back(place)


@on_a_loop
async def test_errors_are_answered_as_without_it():
    async with two_routers() as place, openai_client(place, place.transport()) as client:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="fake", messages=HELLO, temperature=-1, stream=True)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=HELLO)
        assert [model.id async for model in client.models.list()] == ["fake"]


@on_a_loop
async def test_a_client_that_leaves_ends_its_request():
    async with two_routers() as place, openai_client(place, place.transport()) as client:
        stream = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=100_000, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await eventually(lambda: _is_idle(place.routers))


async def read_and_refuse(place: Two, stream) -> None:
    async for _ in stream:
        for cutter in place.cutters:
            cutter.refuses = True


async def stranger(answer: Callable[[bytes], bytes]) -> tuple[asyncio.Server, list[bytes]]:
    """A server of others, and what it was sent."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer(seen[-1]))
        await writer.drain()
        writer.transport.abort() if b"cut" in answer(b"") else writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0), seen


@on_a_loop
async def test_servers_of_others_are_left_as_they_are():
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunk["choices"] = [{"index": 0, "delta": {"content": "cut"}}]
    event = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    server, seen = await stranger(lambda request: head + b"%x\r\n%s\r\n" % (len(event), event))
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for addresses in ([address], ["127.0.0.1:9"]):
        http = httpx2.AsyncClient(transport=HoldingTransport(addresses))
        async with openai.AsyncOpenAI(
            base_url=f"http://{address}/v1", api_key="x", max_retries=0, http_client=http
        ) as client:
            stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
            with pytest.raises((httpx2.HTTPError, openai.APIConnectionError)):
                async for _ in stream:
                    pass
    assert [b"x-holdfast-hold" in request for request in seen] == [True, False]
    server.close()


def test_addresses_are_checked():
    for wrong in ("127.0.0.1:8000", [], ["ftp://x"], ["http://x:80/v1"]):
        with pytest.raises(ValueError, match="address"):
            HoldingTransport(wrong)


def test_marks_may_come_in_any_pieces():
    policy = RetryPolicy(num_routers=1, connect_s=1, reconnect_s=1, timeout_s=None, draw=lambda: 0.5, now=0.0)
    wire = (
        b": waiting\n\n"
        b'data: {"a": ": held "}\n\n: held {"s":0,"t":[1],"c":1,"p":"f"}\n\n'
        b'data: b\n\ndata: c\n\n: held {"s":0,"t":[2,3],"c":4,"p":"f","end":true}\n\n'
    )
    for size in range(1, len(wire)):
        call = HeldCall(b"{}", policy, 0.0)
        call.submission(0.0)
        call.verdict(200, "id 5", None)
        got = b"".join(call.push(wire[at : at + size]) for at in range(0, len(wire), size))
        assert got.removeprefix(b": waiting\n\n") == b'data: {"a": ": held "}\n\ndata: b\n\ndata: c\n\n'
        assert (call.noted.sequences[0].token_ids, call.noted.sequences[0].num_chars) == ([1, 2, 3], 5)
        assert call.is_over


def test_an_error_keeps_its_vendors_shape():
    assert error_event(b'{"error": {}}').startswith(b"data: ")
    assert error_event(b'{"type": "error", "error": {}}').startswith(b"event: error\ndata: ")
    assert b"server_error" in error_event(b"<html>")
