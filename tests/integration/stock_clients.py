"""Stock clients of the gRPC APIs on a live cluster: raw stubs, tritonclient, and those of vLLM's gateways."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from holdfast.foreign import grpc_service_pb2_grpc
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from tests.programs import printed_by
from tests.router.api.open_inference.messages import infer, text

PROMPT = "Once upon a time"
NUM_TOKENS = 300
NUM_TRITON = 4

_TRITON = Path(__file__).parents[1] / "router" / "api" / "open_inference" / "triton_streams.py"


async def stock_texts(address: str, over: asyncio.Event | None = None) -> dict[str, str]:
    """What each client is told, all at the same time.

    tritonclient's process takes long to start: the stubs ask again and again, also beside it, until it is `over`.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        stub, oip = _until(over, partial(_by_the_stub, channel)), _until(over, partial(_by_oip, channel))
        message = await asyncio.gather(stub, oip, _by_triton(address))
    return dict(zip(("stub", "open inference", "tritonclient"), message, strict=True))


async def _until(over: asyncio.Event | None, ask: Callable[[], Awaitable[str]]) -> str:
    """What it is told each time."""
    message = await ask()
    while over is not None and not over.is_set():
        assert await ask() == message
    return message


async def _by_the_stub(channel: grpc.aio.Channel) -> str:
    params = inference_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    asked = inference_pb2.GenerateRequest(text=PROMPT, sampling_params=params)
    chunks = inference_pb2_grpc.InferenceStub(channel).GenerateStream(asked)
    return "".join([chunk.text async for chunk in chunks])


async def _by_oip(channel: grpc.aio.Channel) -> str:
    sampling = {"temperature": "0", "max_tokens": str(NUM_TOKENS), "ignore_eos": "true"}
    asked = infer(PROMPT, sampling=sampling, stream=True)
    answers = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([asked]))
    return text([answer async for answer in answers])


async def _by_triton(address: str) -> str:
    return await printed_by(sys.executable, _TRITON, address, "demo", str(NUM_TRITON), str(NUM_TOKENS))


async def by_a_gateway(address: str, num_tokens: int) -> tuple[str, list[int]]:
    """The model's name and the tokens that a replica answers to the stubs of vLLM's gateways."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        params = vllm_engine_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        asked = vllm_engine_pb2.GenerateRequest(request_id="g", text=PROMPT, sampling_params=params, stream=True)
        tokens = [token async for answer in stub.Generate(asked) for token in answer.chunk.token_ids]
        assert json.loads(info.default_sampling_params_json or "{}") is not None
        assert (await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy
    return info.served_model_name, tokens


async def tokens_of(address: str, num_tokens: int) -> list[int]:
    """The same through a router."""
    async with grpc.aio.insecure_channel(address) as channel:
        params = inference_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        asked = inference_pb2.GenerateRequest(text=PROMPT, sampling_params=params)
        answer = await inference_pb2_grpc.InferenceStub(channel).Generate(asked)
    return list(answer.completions[0].token_ids)
