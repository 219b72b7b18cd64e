"""A client of a router's gRPC API, for programs that run on asyncio.

What may live here: calls, and statuses to errors. What may not: conversion (`wire.py`), and anything of Ray or of the
engine; a client needs neither.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from cluster.generation import Chunk, Generation
from cluster.wire import chunk, generate_request, generation
from holdfast_pb import inference_pb2, inference_pb2_grpc
from worker.errors import (
    CallerError,
    CapacityError,
    DeadlineExceededError,
    HoldfastError,
    InternalError,
    ReplicaError,
    RequestAbortedError,
)
from worker.request import Priority, SamplingParams

_CALLER_CODES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.OUT_OF_RANGE,
}
_DEFAULT_RETRY_S: Final = 1.0


class AsyncClient:
    """One connection to one router. Use it as an async context manager, on one event loop."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """The completions as they come. Leaving the iteration, or cancelling the task, aborts the request.

        With n > 1, chunks of different completions take turns. `best_of` and `beam_width` are for `generate` alone.
        Raises the error tree of `worker/errors.py`: `CallerError` for what a retry cannot mend, `CapacityError` and
        `ReplicaError` with `retry_after_s`.
        """
        params = params or SamplingParams()
        call = self._stub.GenerateStream(
            generate_request(prompt, params, model=model, request_id=request_id, priority=priority, timeout_s=timeout_s)
        )
        try:
            with _translated():
                async for message in call:
                    yield chunk(message, params)
        finally:
            call.cancel()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> Generation:
        """All completions, when they have ended. Cancelling the task aborts the request. Raises as `stream` does."""
        params = params or SamplingParams()
        request = generate_request(
            prompt, params, model=model, request_id=request_id, priority=priority, timeout_s=timeout_s
        )
        with _translated():
            return generation(await self._stub.Generate(request), params)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """The text of token ids, without special tokens. Raises as `stream` does."""
        with _translated():
            answer = await self._stub.Detokenize(inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids))
            return str(answer.text)

    async def get_load(self) -> inference_pb2.GetLoadResponse:
        """How busy the router and its replicas are. Raises as `stream` does."""
        with _translated():
            load: inference_pb2.GetLoadResponse = await self._stub.GetLoad(inference_pb2.GetLoadRequest())
            return load

    async def list_models(self) -> inference_pb2.ListModelsResponse:
        """The models that are served, and by how many replicas. Raises as `stream` does."""
        with _translated():
            models: inference_pb2.ListModelsResponse = await self._stub.ListModels(inference_pb2.ListModelsRequest())
            return models


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _error(error) from error


def _error(error: grpc.aio.AioRpcError) -> HoldfastError:
    """The error tree's word for a status."""
    code, message = error.code(), error.details() or error.code().name
    if code in _CALLER_CODES:
        return CallerError(message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return CapacityError(message, _retry_after_s(error))
    if code is grpc.StatusCode.UNAVAILABLE:
        return ReplicaError(message, _retry_after_s(error))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError(message)
    if code is grpc.StatusCode.CANCELLED:
        return RequestAbortedError(message)
    return InternalError(f"{code.name}: {message}")


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it asks for less than a Call
    info = RetryInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return float(info.retry_delay.ToTimedelta().total_seconds())
    return _DEFAULT_RETRY_S
