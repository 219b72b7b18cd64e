"""vLLM's engine protocol (`vllm.grpc.engine.VllmEngine`) over the router's pipeline, for gateways that drive engines.

What may live here: the methods. What may not: conversion (`generate_request.py`, `generate_response.py`), what is told
of the engine (`engine_facts.py`), and where an engine comes from (`cluster/serve/engine_door.py`).
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from holdfast.foreign import vllm_engine_pb2 as pb
from holdfast.router.doors.decode_worker import DecodeWorker
from holdfast.router.doors.grpc.handlers import Context
from holdfast.router.doors.grpc.request_ids import given_request_id
from holdfast.router.doors.vllm.engine_facts import SERVER_TYPE, LoadReport, MeasuredEngine, model_info, timestamp
from holdfast.router.doors.vllm.generate_request import generation_request
from holdfast.router.doors.vllm.generate_response import GenerateResponses
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.worker.model_info import ModelInfo

SERVICE: Final = pb.DESCRIPTOR.services_by_name["VllmEngine"]


class VllmEngineServicer:
    """Of one engine. Errors are raised as `HoldfastError`."""

    def __init__(
        self,
        request_processor: RequestProcessor,
        engine: MeasuredEngine,
        facts: ModelInfo,
        max_num_seqs: int,
        decode_worker: DecodeWorker | None = None,
    ) -> None:
        """Requests are made of large messages by the `decode_worker`, or one of its own."""
        self._decode_worker = decode_worker or DecodeWorker()
        self._request_processor = request_processor
        self._engine = engine
        self._facts = facts
        self._max_num_seqs = max_num_seqs
        self._report = LoadReport(facts, max_num_seqs)
        self._started_s = time.monotonic()
        self._last_request_at = 0.0

    async def Generate(
        self, message: pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        self._last_request_at = time.time()
        made = partial(generation_request, message, given_request_id(context))
        request = await self._decode_worker.run(message.ByteSize(), made)
        request.check_streamable()
        async with self._request_processor.open(request, context.time_remaining()) as answer:
            responses = GenerateResponses(answer.prompt_token_ids, answer.stop_reason, stream=message.stream)
            if not message.stream:
                for whole in await answer.outputs():
                    for response in responses.of(whole):
                        yield response
                return
            async for delivery in answer:
                for response in responses.of(delivery):
                    yield response

    async def HealthCheck(self, message: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        failure = self._engine.failure
        if failure is None and self._request_processor.is_closed:
            return pb.HealthCheckResponse(healthy=False, message="the replica is stopping")
        return pb.HealthCheckResponse(healthy=failure is None, message="" if failure is None else str(failure))

    async def Abort(self, message: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ids that are not open are passed over."""
        for request_id in filter(None, message.request_ids):
            self._request_processor.abort(request_id)
        return pb.AbortResponse()

    async def GetModelInfo(self, message: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return await asyncio.to_thread(model_info, self._facts)

    async def GetServerInfo(self, message: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        load = self._engine.load
        return pb.GetServerInfoResponse(
            active_requests=load.num_running + load.num_waiting,
            is_paused=self._request_processor.is_closed,
            last_receive_timestamp=self._last_request_at,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            block_size=self._facts.block_size,
            model_dtype=f"torch.{self._facts.dtype}",
            max_num_seqs=self._max_num_seqs,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, message: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        stats = await asyncio.to_thread(self._engine.stats)
        loads = [self._report.of(self._engine.load, stats)]
        return pb.GetLoadsResponse(timestamp=timestamp(), version=_version(), dp_rank_count=len(loads), loads=loads)


def _version() -> str:
    try:
        return version("holdfast")
    except PackageNotFoundError:
        return "a checkout that is not installed"
