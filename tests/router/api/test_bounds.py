"""Bounds of a router's ports: each is hit once, and what its client is told is read."""

import asyncio
from contextlib import suppress

import grpc
import httpx
import pytest

from holdfast.router.api.http.server import HttpServer
from holdfast.router.config import LimitsConfig
from holdfast.router.request import GenerationRequest
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import DeadlineExceededError
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica
from tests.loops import on_a_loop, on_each_loop
from tests.router.site import Site, eventually, refusal, request, site

COMPLETION = {"prompt": "x", "max_tokens": 1}


def limited(**limits: object) -> dict:
    return {"limits": LimitsConfig(**limits)}


async def dialled(place: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = place.router.http_address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def still_serves(place: Site) -> None:
    assert (await place.stub.Generate(request())).completions[0].text
    async with httpx.AsyncClient() as client:
        url = f"http://{place.router.http_address}/v1/completions"
        assert (await client.post(url, json=COMPLETION)).status_code == 200


@on_a_loop
async def test_messages_and_prompts_have_their_sizes():
    async with site(
        await FakeReplica.start(), http=True, **limited(max_message_bytes=2**20, max_prompt_bytes=99)
    ) as place:
        assert (await refusal(place.stub.Generate(request("x" * 2**20)))).code == "RESOURCE_EXHAUSTED"
        refused = await refusal(place.stub.Generate(request("x" * 100)))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "text")
        assert "limits.max_prompt_bytes" in refused.message
        async with httpx.AsyncClient(base_url=f"http://{place.router.http_address}") as client:
            for size, limit in ((2**20, "limits.max_message_bytes"), (100, "limits.max_prompt_bytes")):
                refused = await client.post("/v1/completions", json={"prompt": "x" * size})
                assert refused.status_code == 400
                assert limit in refused.json()["error"]["message"]
        await still_serves(place)


@on_a_loop
async def test_headers_have_a_size_however_they_arrive():
    async with site(await FakeReplica.start(), http=True, **limited(max_header_bytes=8192)) as place:
        metadata = tuple((f"x-{number}", "v" * 1000) for number in range(9))
        assert (await refusal(place.stub.Generate(request(), metadata=metadata))).code == "RESOURCE_EXHAUSTED"
        await place.stub.Generate(request(), metadata=metadata[:6])
        url = f"http://{place.router.http_address}/v1/completions"
        async with httpx.AsyncClient() as client:
            refused = await client.post(url, json=COMPLETION, headers={"x-long": "v" * 9000})
            assert (refused.status_code, "limits.max_header_bytes" in refused.text) == (431, True)
            assert (await client.post(url, json=COMPLETION, headers={"x-long": "v" * 6000})).status_code == 200
        for endless in (b"GET /health HTTP/1.1\r\nx-a: ", b"GET /", b"GET /health HTTP/1.1\r\n"):
            reader, writer = await dialled(place)
            writer.write(endless)
            answer = asyncio.ensure_future(reader.read())
            with suppress(ConnectionError):
                while not answer.done():
                    writer.write(b"x-b: 1\r\n" * 100 if endless.endswith(b"\n") else b"v" * 1000)
                    await writer.drain()
                    await asyncio.sleep(0)
            with suppress(ConnectionError):
                assert b" 431 " in (await answer).split(b"\r\n")[0]
            writer.close()
        await still_serves(place)


@on_a_loop
async def test_http_has_as_many_connections_as_it_may():
    async with site(await FakeReplica.start(), http=True, **limited(max_connections=3)) as place:
        held = [await dialled(place) for _ in range(3)]
        for reader, writer in held:
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in await reader.readline()
        reader, writer = await dialled(place)
        answer = await reader.read()
        assert b" 503 " in answer.split(b"\r\n")[0]
        assert b"limits.max_connections" in answer
        for _, other in (*held, (reader, writer)):
            other.close()

        async def serves_again() -> bool:
            with suppress(httpx.HTTPError):
                await still_serves(place)
                return True
            return False

        await eventually(serves_again)


@on_a_loop
async def test_grpc_has_as_many_connections_as_it_may():
    async with site(await FakeReplica.start(), **limited(max_connections=2)) as place:
        own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        asked = inference_pb2.ListModelsRequest()
        async with (
            grpc.aio.insecure_channel(place.router.address, options=own) as second,
            grpc.aio.insecure_channel(place.router.address, options=own) as third,
        ):
            await type(place.stub)(second).ListModels(asked)
            assert (await refusal(type(place.stub)(third).ListModels(asked, timeout=30))).code == "UNAVAILABLE"
            assert (await place.stub.ListModels(asked)).models


@on_a_loop
async def test_a_request_that_does_not_arrive_is_let_go():
    async with site(await FakeReplica.start(), http=True, **limited(receive_timeout_s=0.2)) as place:
        beginnings = (
            b"",
            b"POST /v1/completions HTTP/1.1\r\n",
            b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET ",
        )
        for beginning in beginnings:
            reader, writer = await dialled(place)
            writer.write(beginning)
            answer = await reader.read()  # ends when the connection does
            assert b" 408 " in answer
            assert b"limits.receive_timeout_s" in answer
            writer.close()
        reader, writer = await dialled(place)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: 9\r\n\r\nhalf")
        assert await reader.read() == b""  # an answer is under way: the connection is closed
        writer.close()
        await still_serves(place)


@on_each_loop
async def test_a_reader_that_takes_nothing_is_let_go_by_http():
    is_gone = asyncio.Event()

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        watching = asyncio.ensure_future(receive())
        while not (watching.done() and watching.result()["type"] == "http.disconnect"):
            if watching.done():
                watching = asyncio.ensure_future(receive())
            await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
            await asyncio.sleep(0)
        is_gone.set()

    server = HttpServer(endless, "127.0.0.1", 0, limits=LimitsConfig(slow_reader_s=0.2))
    await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await is_gone.wait()
    writer.close()
    await server.stop(1.0)


@on_a_loop
async def test_an_answer_that_nobody_takes_ends_after_its_deadline():
    """Whatever a API waits for: over gRPC, for a client to take a message."""
    replica = await FakeReplica.start()
    async with site(replica, **limited(slow_reader_s=0.1)) as place:
        asked = GenerationRequest(prompt="x", timeout_s=0.1, sampling_params=SamplingParams(max_tokens=10**5))
        with pytest.raises(DeadlineExceededError, match=r"limits\.slow_reader_s"):
            async with place.router._request_processor.open(asked):
                await asyncio.Event().wait()
        assert not place.router._request_processor._open_answers._answers


def test_limits_that_make_no_sense_are_refused():
    for wrong in ({"max_connections": 0}, {"slow_reader_s": 0}, {"receive_timeout_s": -1}, {"max_header_bytes": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LimitsConfig(**wrong)
