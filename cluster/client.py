"""A client of a router's gRPC API, for programs that run on asyncio.

What may live here: the public stubs, plain data to messages and back, statuses to errors. What may not: anything of Ray
or of the engine; a client needs neither.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

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
from worker.request import FinishReason, Priority, SamplingParams, TokenLogprob
from worker.structured_outputs import StructuredOutputs

_CALLER_CODES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.OUT_OF_RANGE,
}
_FINISH_REASONS: Final = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: None,
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_PRIORITIES: Final = {
    Priority.CRITICAL: inference_pb2.PRIORITY_CRITICAL,
    Priority.HIGH: inference_pb2.PRIORITY_HIGH,
    Priority.NORMAL: inference_pb2.PRIORITY_NORMAL,
    Priority.LOW: inference_pb2.PRIORITY_LOW,
}
_DEFAULT_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What is new of a completion. The chunks of one request continue each other without gap or overlap."""

    request_id: str
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    """Set on the last chunk."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where the request asks for them; else empty."""


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
        tenant: str = "",
    ) -> AsyncIterator[Chunk]:
        """The completion as it comes. Leaving the iteration, or cancelling the task, aborts the request.

        Raises the error tree of `worker/errors.py`: `CallerError` for what a retry cannot mend, `CapacityError` and
        `ReplicaError` with `retry_after_s`.
        """
        request = _request(prompt, params or SamplingParams(), model, request_id, priority, timeout_s, tenant)
        call = self._stub.GenerateStream(request)
        try:
            with _translated():
                async for message in call:
                    yield _chunk(message)
        finally:
            call.cancel()

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


def _request(
    prompt: str | Sequence[int],
    params: SamplingParams,
    model: str,
    request_id: str,
    priority: Priority,
    timeout_s: float | None,
    tenant: str,
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        model=model,
        request_id=request_id,
        sampling_params=_sampling_params(params),
        priority=_PRIORITIES[priority],
        tenant=tenant,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    if timeout_s is not None:
        request.timeout_ms = round(1000 * timeout_s)
    return request


def _sampling_params(params: SamplingParams) -> inference_pb2.SamplingParams:
    message = inference_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        stop=params.stop_strings,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_p=params.min_p,
        min_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        logprobs=params.logprobs,
    )
    if params.structure is not None:
        message.structured_outputs.CopyFrom(_structured_outputs(params.structure))
    if params.seed is not None:
        message.seed = params.seed
    if params.max_tokens is not None:
        message.max_tokens = params.max_tokens
    return message


def _structured_outputs(wish: StructuredOutputs) -> inference_pb2.StructuredOutputs:
    if wish.choice is not None:
        return inference_pb2.StructuredOutputs(choice=inference_pb2.Choice(texts=wish.choice))
    return inference_pb2.StructuredOutputs(**{wish.kind: getattr(wish, wish.kind)})


def _chunk(message: inference_pb2.GenerateStreamResponse) -> Chunk:
    return Chunk(
        request_id=message.request_id,
        first_token_index=message.first_token_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=_FINISH_REASONS[message.finish_reason],
        logprobs=tuple(_logprob(item) for item in message.logprobs),
    )


def _logprob(item: inference_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple((best.token_id, best.logprob) for best in item.top)
    return TokenLogprob(token_id=item.token_id, logprob=item.logprob, rank=item.rank, top=top)


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
