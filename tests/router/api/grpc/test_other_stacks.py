"""Clients with other HTTP/2 stacks than gRPC's core: `buf curl`, which knows the API by reflection, and grpclib."""

import asyncio
import json
import sys
from pathlib import Path
from shutil import which

import grpclib
import pytest
from grpclib.client import Channel, StreamStreamMethod, UnaryStreamMethod, UnaryUnaryMethod

from holdfast.foreign import grpc_service_pb2, health_pb2
from holdfast.v1 import inference_pb2
from tests.fakes import FakeReplica
from tests.loops import on_a_loop, on_each_loop
from tests.programs import outcome
from tests.router.api.open_inference.messages import infer, text
from tests.router.site import Site, expected, request, site

# --- buf curl ---

BUF = which("buf", path=str(Path(sys.executable).parent)) or which("buf")
ASKED = {"text": "hello", "samplingParams": {"maxTokens": 6, "seed": "5"}}


async def buf_curl(place: Site, method: str, data: dict, *more: str) -> tuple[int, list[dict], str]:
    """Its exit code, the answers, and what it says of an error."""
    assert BUF is not None, "buf-bin belongs to the tools that tests need"
    url = f"http://{place.router.address}/{method}"
    arguments = ("curl", "--protocol", "grpc", "--http2-prior-knowledge", *more, "-d", json.dumps(data), url)
    ended = await outcome(BUF, *arguments)
    return ended.returncode, documents(ended.stdout), ended.stderr


def documents(text: str) -> list[dict]:
    """One JSON document after the other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip()):
        document, at = decoder.raw_decode(text, at)
        found.append(document)
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


@on_a_loop
async def test_buf_curl_asks_by_reflection_whole_and_streamed():
    async with site(await FakeReplica.start()) as place:
        code, (answer,), errors = await buf_curl(place, "holdfast.v1.Inference/Generate", ASKED)
        assert code == 0, errors
        assert answer["completions"][0]["text"] == expected("hello", 5, 6)[1]
        code, chunks, errors = await buf_curl(place, "holdfast.v1.Inference/GenerateStream", ASKED)
        assert code == 0, errors
        assert "".join(chunk.get("text", "") for chunk in chunks) == expected("hello", 5, 6)[1]
        assert len(chunks) > 1
        code, (ready,), errors = await buf_curl(place, "inference.GRPCInferenceService/ServerReady", {})
        assert (code, ready) == (0, {"ready": True}), errors
        code, (health,), errors = await buf_curl(place, "grpc.health.v1.Health/Check", {"service": "fake"})
        assert (code, health) == (0, {"status": "SERVING"}), errors


@on_a_loop
async def test_buf_curl_is_told_which_field_is_wrong():
    async with site(await FakeReplica.start()) as place:
        wrong = {"text": "x", "samplingParams": {"topP": 7}}
        code, _, errors = await buf_curl(place, "holdfast.v1.Inference/Generate", wrong)
        assert code == 8 * 3  # buf's exit code is that of gRPC times eight
        assert "sampling_params.top_p" in errors


# --- grpclib ---


def channel_to(place: Site) -> Channel:
    host, _, port = place.router.address.rpartition(":")
    return Channel(host, int(port))


@on_each_loop
async def test_grpclib_asks_whole_and_streamed():
    async with site(await FakeReplica.start()) as place, channel_to(place) as channel:
        service = "/holdfast.v1.Inference"
        generate = UnaryUnaryMethod(
            channel, f"{service}/Generate", inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
        )
        assert (await generate(request(seed=5))).completions[0].text == expected("hello", 5, 8)[1]
        stream = UnaryStreamMethod(
            channel, f"{service}/GenerateStream", inference_pb2.GenerateRequest, inference_pb2.GenerateStreamResponse
        )
        chunks = await stream(request(seed=5))
        assert "".join(chunk.text for chunk in chunks) == expected("hello", 5, 8)[1]
        kinds = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        check = UnaryUnaryMethod(channel, "/grpc.health.v1.Health/Check", *kinds)
        assert (await check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


@on_a_loop
async def test_a_grpclib_client_that_leaves_takes_its_request_off_the_replica():
    replica = await FakeReplica.start()
    async with site(replica) as place, channel_to(place) as channel:
        stream = UnaryStreamMethod(
            channel,
            "/holdfast.v1.Inference/GenerateStream",
            inference_pb2.GenerateRequest,
            inference_pb2.GenerateStreamResponse,
        )
        async with stream.open() as call:
            await call.send_message(request(max_tokens=50_000), end=True)
            await call.recv_message()
            await call.cancel()
        await place.until_idle()


@on_a_loop
async def test_grpclib_is_told_the_status_and_its_details():
    async with site(await FakeReplica.start()) as place, channel_to(place) as channel:
        generate = UnaryUnaryMethod(
            channel,
            "/holdfast.v1.Inference/Generate",
            inference_pb2.GenerateRequest,
            inference_pb2.GenerateResponse,
        )
        with pytest.raises(grpclib.GRPCError) as refused:
            await generate(request(model="other"))
        assert refused.value.status is grpclib.Status.NOT_FOUND
        assert "served: fake" in refused.value.message
        assert refused.value.details


@on_a_loop
async def test_grpclib_interleaves_requests_on_one_stream():
    async with site(await FakeReplica.start()) as place, channel_to(place) as channel:
        stream = StreamStreamMethod(
            channel,
            "/inference.GRPCInferenceService/ModelStreamInfer",
            grpc_service_pb2.ModelInferRequest,
            grpc_service_pb2.ModelStreamInferResponse,
        )
        asked = [infer(f"prompt {number}", id=str(number), stream=True) for number in range(4)]
        texts = {str(number): "" for number in range(4)}
        for answer in await stream(asked):
            texts[answer.infer_response.id] += text([answer])
        assert texts == {str(number): expected(f"prompt {number}", 1, 8)[1] for number in range(4)}


@pytest.mark.parametrize("count", [32])
@on_a_loop
async def test_many_grpclib_streams_share_one_connection(count):
    async with site(await FakeReplica.start()) as place, channel_to(place) as channel:
        stream = UnaryStreamMethod(
            channel,
            "/holdfast.v1.Inference/GenerateStream",
            inference_pb2.GenerateRequest,
            inference_pb2.GenerateStreamResponse,
        )
        answers = await asyncio.gather(*(stream(request(seed=seed, max_tokens=30)) for seed in range(count)))
        for seed, chunks in enumerate(answers):
            assert "".join(chunk.text for chunk in chunks) == expected("hello", seed, 30)[1]
