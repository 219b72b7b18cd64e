"""Failover through every gRPC API, by stock clients: a replica dies in mid-stream, and the text is the same."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
from grpclib.client import Channel, UnaryStreamMethod

from holdfast.foreign import grpc_service_pb2, grpc_service_pb2_grpc
from holdfast.router.request import GenerationRequest
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica
from tests.loops import on_a_loop, on_each_loop
from tests.programs import printed_by
from tests.router.api.open_inference.messages import infer, text
from tests.router.site import Site, expected, request, site

NUM_TOKENS = 60
WANTED = expected("hello", 1, NUM_TOKENS)[1]
CUTS = (0, 1, 2, 7, 30, NUM_TOKENS - 1)
TRITON_CLIENT = Path(__file__).parent / "open_inference" / "triton_streams.py"


# --- streams of text, by API ---


async def by_the_stub(place: Site) -> AsyncIterator[str]:
    async with grpc.aio.insecure_channel(place.router.address) as channel:
        async for chunk in inference_pb2_grpc.InferenceStub(channel).GenerateStream(request(max_tokens=NUM_TOKENS)):
            yield chunk.text


async def by_grpclib(place: Site) -> AsyncIterator[str]:
    host, _, port = place.router.address.rpartition(":")
    kinds = inference_pb2.GenerateRequest, inference_pb2.GenerateStreamResponse
    async with Channel(host, int(port)) as channel:
        method = UnaryStreamMethod(channel, "/holdfast.v1.Inference/GenerateStream", *kinds)
        async with method.open() as call:
            await call.send_message(request(max_tokens=NUM_TOKENS), end=True)
            async for chunk in call:
                yield chunk.text


async def by_open_inference(place: Site) -> AsyncIterator[str]:
    sampling = {"max_tokens": str(NUM_TOKENS), "seed": "1"}

    async def asked() -> AsyncIterator[grpc_service_pb2.ModelInferRequest]:
        yield infer(sampling=sampling, stream=True)

    async with grpc.aio.insecure_channel(place.router.address) as channel:
        async for answer in grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(asked()):
            assert not answer.error_message
            yield text([answer])


async def in_process(place: Site) -> AsyncIterator[str]:
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=1)
    async with aclosing(
        place.router.in_process.stream(GenerationRequest(prompt="hello", sampling_params=params))
    ) as it:
        async for chunk in it:
            yield chunk.text


@pytest.mark.in_turn
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("api", [by_the_stub, by_grpclib, by_open_inference, in_process])
@on_each_loop
async def test_a_stream_whose_replica_dies_after_some_of_it_has_the_same_text(api, cut):
    one, other = await FakeReplica.start("one"), await FakeReplica.start("other")
    async with site(one, other) as place:
        one.pause()
        other.pause()
        pieces = asyncio.create_task(collected(api(place)))
        runs = await that_runs(one, other)
        runs.resume()
        await runs.until(lambda: runs.num_tokens >= cut)
        await runs.kill()
        place.replicas.remove(runs)
        (one if runs is other else other).resume()
        assert "".join(await pieces) == WANTED


async def collected(pieces: AsyncIterator[str]) -> list[str]:
    return [piece async for piece in pieces]


async def that_runs(*replicas: FakeReplica) -> FakeReplica:
    """The first of them that is given something to run."""
    waits = {asyncio.create_task(replica.until(lambda it=replica: it.running)): replica for replica in replicas}
    done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in rest:
        wait.cancel()
    await asyncio.wait(waits)
    return waits[done.pop()]


# --- whole answers ---


async def whole_by_the_stub(place: Site) -> str:
    answer = await place.stub.Generate(request(max_tokens=NUM_TOKENS))
    return answer.completions[0].text


async def whole_by_open_inference(place: Site) -> str:
    asked = infer(sampling={"max_tokens": NUM_TOKENS, "seed": 1}, exclude_input_in_output=True)
    answer = await grpc_service_pb2_grpc.GRPCInferenceServiceStub(place.channel).ModelInfer(asked)
    return text([grpc_service_pb2.ModelStreamInferResponse(infer_response=answer)])


@pytest.mark.parametrize("api", [whole_by_the_stub, whole_by_open_inference])
@on_each_loop
async def test_a_whole_answer_whose_replica_dies_is_the_same(api):
    one, other = await FakeReplica.start("one"), await FakeReplica.start("other")
    async with site(one, other) as place:
        one.pause()
        other.pause()
        answer = asyncio.create_task(api(place))
        runs = await that_runs(one, other)
        runs.resume()
        await runs.until(lambda: runs.num_tokens >= 20)
        await runs.kill()
        place.replicas.remove(runs)
        (one if runs is other else other).resume()
        assert await answer == WANTED


# --- tritonclient, in a process of its own ---


@on_a_loop
async def test_tritonclients_streams_outlive_their_replica():
    one, other = await FakeReplica.start("one", step_s=0.01), await FakeReplica.start("other", step_s=0.01)
    async with site(one, other) as place:
        arguments = (str(TRITON_CLIENT), place.router.address, "fake", "8", str(NUM_TOKENS))
        client = asyncio.create_task(printed_by(sys.executable, *arguments))
        await one.until(lambda: one.num_tokens >= 20)
        await one.kill()
        place.replicas.remove(one)
        message = (await client).splitlines()
        assert message == [f"{number} {expected(f'prompt {number}', 1, NUM_TOKENS)[1]}" for number in range(8)]
