"""Senders against servers over loopback: our router by all of its protocols, and a server of someone else's."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from holdfast.cluster.bench.driver import calibrate
from holdfast.cluster.bench.runs import Target
from holdfast.cluster.bench.sender import Ask, EventReader, Reply, Sender, SendFailed
from holdfast.cluster.bench.workload import Calibration
from holdfast.worker.errors import ConfigurationError
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.api.http.test_openai_sdk import TEMPLATE
from tests.router.site import Site, expected, site

PARAMS = {"temperature": 0.0, "ignore_eos": True}


@asynccontextmanager
async def server() -> AsyncIterator[Site]:
    load = lambda path: byte_tokenizer(path, TEMPLATE)  # noqa: E731
    replica = await FakeReplica.start(step_s=0.0)
    replica.max_model_len = 4000
    async with site(replica, load_tokenizer=load, http=True) as place:
        yield place


@asynccontextmanager
async def sender_to(place: Site, protocol: str, params: dict | None = None) -> AsyncIterator[Sender]:
    over_http = protocol in ("chat", "completions")
    where = f"http://{place.router.http_address}" if over_http else place.router.address
    sender, _ = await Target.parsed(where, protocol).sender("", PARAMS if params is None else params)
    try:
        yield sender
    finally:
        await sender.close()


async def sent(sender: Sender, *texts: str, max_tokens: int = 8) -> tuple[Reply, int]:
    num_pieces = 0

    def count(*, is_silent_end: bool = False) -> None:
        nonlocal num_pieces
        num_pieces += not is_silent_end

    return await sender.send(Ask(texts, max_tokens), count), num_pieces


@pytest.mark.parametrize("protocol", ["completions", "holdfast", "oip"])
@on_a_loop
async def test_every_protocol_brings_the_same_text_and_counts(protocol):
    async with server() as place, sender_to(place, protocol, {**PARAMS, "seed": 1}) as sender:
        reply, num_pieces = await sent(sender, "hello", max_tokens=12)
    cached = 0 if protocol == "holdfast" else None
    text = expected("hello", 1, 12)[1]
    assert reply == Reply(text=text, num_output_tokens=12, num_prompt_tokens=5, num_cached_tokens=cached)
    assert 0 < num_pieces <= 12


@pytest.mark.parametrize("protocol", ["chat", "holdfast-chat"])
@on_a_loop
async def test_turns_become_a_conversation(protocol):
    async with server() as place, sender_to(place, protocol) as sender:
        one, _ = await sent(sender, "hello")
        three, _ = await sent(sender, "hello", "good day", "who is there")
    assert one.num_output_tokens == three.num_output_tokens == 8
    assert three.num_prompt_tokens - one.num_prompt_tokens > len("good day" + "who is there")


@pytest.mark.parametrize("protocol", ["completions", "holdfast", "oip"])
@on_a_loop
async def test_the_calibration_finds_how_the_server_counts(protocol):
    async with server() as place, sender_to(place, protocol) as sender:
        found = await calibrate(sender, seed=0)
    assert found.is_measured
    assert 4 < found.tokens_per_word < 6.5, "a token is a byte there, and words have some five with the space"
    assert found != Calibration()


@pytest.mark.parametrize(("protocol", "kind"), [("completions", "HTTP 400"), ("holdfast", "invalid argument")])
@on_a_loop
async def test_a_refusal_has_its_kind_and_the_servers_words(protocol, kind):
    async with server() as place, sender_to(place, protocol) as sender:
        with pytest.raises(SendFailed) as failed:
            await sent(sender, "hello" * 1000)
    assert failed.value.kind == kind
    assert "4000" in failed.value.message


@on_a_loop
async def test_a_refusal_by_the_open_inference_protocol_has_its_kind():
    async with server() as place, sender_to(place, "oip") as sender:
        with pytest.raises(SendFailed) as failed:
            await sent(sender, "hello" * 1000)
    assert failed.value.kind == "invalid argument"


@pytest.mark.parametrize("protocol", ["completions", "holdfast", "oip"])
@on_a_loop
async def test_a_server_that_is_not_there_is_said_before_the_load(protocol):
    scheme = "http://" if protocol == "completions" else ""
    sender, _ = await Target.parsed(f"{scheme}127.0.0.1:1", protocol).sender("demo", PARAMS)
    with pytest.raises(ConfigurationError, match="--server: a first request"):
        await calibrate(sender, seed=0)
    await sender.close()


@on_a_loop
async def test_a_server_that_does_not_name_its_models_asks_for_a_name():
    with pytest.raises(ConfigurationError, match="--model"):
        await Target.parsed("http://127.0.0.1:1", None).sender("", {})


@pytest.mark.parametrize(
    ("server_", "protocol"),
    [("localhost", None), ("http://x", "oip"), ("x:1", "chat"), ("ftp://x:1", None), ("x:y", None), ("x:1", "smtp")],
)
def test_a_target_that_is_none_is_refused(server_, protocol):
    with pytest.raises(ConfigurationError, match=r"--server|--protocol"):
        Target.parsed(server_, protocol)


def test_the_protocol_is_that_of_the_servers_form_and_paths_are_kept():
    assert Target.parsed("a:1,b:2", None) == Target(server="a:1,b:2", protocol="holdfast")
    assert Target.parsed("oip://a:1", None) == Target(server="a:1", protocol="oip")
    assert Target.parsed("http://a:1/", None) == Target(server="http://a:1/v1", protocol="completions")
    assert Target.parsed("https://a/x/v2", "chat") == Target(server="https://a/x/v2", protocol="chat")


# --- a server of someone else's ---


@asynccontextmanager
async def stranger(events: list[str], break_off: bool = False) -> AsyncIterator[Sender]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event.encode())
        if break_off:
            request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site_ = web.TCPSite(runner, "127.0.0.1", 0)
    await site_.start()
    port = site_._server.sockets[0].getsockname()[1]
    sender, _ = await Target.parsed(f"http://127.0.0.1:{port}", None).sender("other", {})
    try:
        yield sender
    finally:
        await sender.close()
        await runner.cleanup()


def text_event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text, 'finish_reason': None}]})}\r\n\r\n"


@on_a_loop
async def test_a_server_that_counts_nothing_has_its_pieces_counted():
    async with stranger(
        [text_event("a"), ": comment\n\n", text_event(""), text_event("b"), "data: [DONE]\n\n"]
    ) as sender:
        assert await sent(sender, "hello") == (Reply(text="ab"), 2)
        assert await calibrate(sender, 0) == Calibration()


@pytest.mark.parametrize(
    ("events", "break_off", "kind"),
    [
        ([text_event("a")], False, "cut off"),
        ([text_event("a")], True, "connection lost"),
        ([text_event("a"), 'data: {"error": {"message": "gone"}}\n\n'], False, "error in the stream"),
        (["data: nonsense\n\n"], False, "unreadable"),
        (["data: 3\n\n"], False, "unreadable"),
    ],
)
@on_a_loop
async def test_an_answer_that_does_not_end_well_is_a_failure(events, break_off, kind):
    async with stranger(events, break_off) as sender:
        with pytest.raises(SendFailed) as failed:
            await sent(sender, "hello")
    assert failed.value.kind == kind


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_read_however_they_are_cut(size):
    data = (
        text_event("one ") + text_event("two") + 'data: {"choices": [], "usage": {"completion_tokens": 2, '
        '"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}\n\n'
    ).encode()
    data += b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\ndata: [DONE]\n\n'
    pieces: list[None] = []
    reader = EventReader(lambda: pieces.append(None))
    for begin in range(0, len(data), size):
        reader.feed(data[begin : begin + size])
    assert reader.reply() == Reply(text="one two", num_output_tokens=2, num_prompt_tokens=9, num_cached_tokens=8)
    assert len(pieces) == 2


@on_a_loop
async def test_a_request_that_is_given_up_leaves_the_server():
    replica = await FakeReplica.start(step_s=0.0)
    async with site(replica, http=True) as place:
        replica.pause()
        for protocol in ("completions", "holdfast", "oip"):
            async with sender_to(place, protocol) as sender:
                task = asyncio.create_task(sent(sender, "hello"))
                await replica.until(lambda: replica.running)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await replica.until(lambda: not replica.running)
        replica.resume()
