"""What `HoldingTransport` does when routers stop or are away, with errors, and with servers of others."""

import asyncio
import json
from collections.abc import Callable

import httpx2
import openai
import pytest

from holdfast import HoldingTransport
from tests.cluster.client.two_routers import NUM_TOKENS, Two, come_back, is_idle, openai_client, two_routers
from tests.loops import on_a_loop
from tests.router.api.http.test_openai_sdk import HELLO, RENDERED, text_of
from tests.router.site import eventually


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
        await eventually(lambda: is_idle(place.routers))


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
            for _ in range(2):
                stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
                with pytest.raises((httpx2.HTTPError, openai.APIConnectionError)):
                    async for _ in stream:
                        pass
    assert [b"x-holdfast-hold" in request for request in seen] == [True, False, False, False], "once is enough"
    server.close()


@pytest.mark.parametrize(
    ("path", "is_sent_again"),
    [("/v1/batches", False), ("/v1/conversations/x/items", False), ("/v1/files", False), ("/v1/completions", True)],
)
@on_a_loop
async def test_what_makes_something_is_not_sent_again_when_its_router_is_lost(path, is_sent_again):
    servers, seen = [], []
    for _ in range(2):
        server, requests = await stranger(lambda request: b"")
        servers.append(server)
        seen.append(requests)
    addresses = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    transport = HoldingTransport(addresses, connect_s=0.2, reconnect_s=0.2)
    async with httpx2.AsyncClient(transport=transport) as http:
        with pytest.raises(httpx2.TransportError):
            await http.post(f"http://{addresses[0]}{path}", json={})
    assert (sum(map(len, seen)) > 1) == is_sent_again
    for server in servers:
        server.close()


def test_addresses_are_checked():
    for wrong in ("127.0.0.1:8000", [], ["ftp://x"], ["http://x:80/v1"]):
        with pytest.raises(ValueError, match="address"):
            HoldingTransport(wrong)
