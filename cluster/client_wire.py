"""Between the client's plain data and the messages of the public API, and from statuses to the error tree.

What may live here: field by field conversion, and which statuses are worth another try. What may not: channels, time.
"""

from collections.abc import Sequence
from typing import Final

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from cluster.chunks import Chunk, Received
from holdfast_pb import inference_pb2
from worker.errors import (
    CallerError,
    CapacityError,
    DeadlineExceededError,
    HoldfastError,
    InternalError,
    ReplicaError,
    RequestAbortedError,
    RequestSupersededError,
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
_BROKEN_CODES: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
_BUG_CODES: Final = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
_DEFAULT_RETRY_S: Final = 1.0


def generate_request(
    prompt: str | Sequence[int],
    params: SamplingParams,
    model: str,
    request_id: str,
    priority: Priority,
    timeout_s: float | None,
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        model=model,
        request_id=request_id,
        sampling_params=_sampling_params(params),
        priority=_PRIORITIES[priority],
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    set_timeout(request, timeout_s)
    return request


def set_timeout(request: inference_pb2.GenerateRequest, timeout_s: float | None) -> None:
    """At least a millisecond; None leaves it to the server."""
    if timeout_s is not None:
        request.timeout_ms = max(1, round(1000 * timeout_s))


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


def chunk_of(message: inference_pb2.GenerateStreamResponse) -> Chunk:
    return Chunk(
        request_id=message.request_id,
        sequence_index=message.sequence_index,
        first_token_index=message.first_token_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=_FINISH_REASONS[message.finish_reason],
        logprobs=tuple(_logprob(item) for item in message.logprobs),
        replayed_without_guarantee=message.replayed_without_guarantee,
        system_fingerprint=message.system_fingerprint,
    )


def _logprob(item: inference_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple((best.token_id, best.logprob) for best in item.top)
    return TokenLogprob(token_id=item.token_id, logprob=item.logprob, rank=item.rank, top=top)


def resume(received: Received) -> inference_pb2.Resume:
    """What a client has of a stream, for the router that is to go on with it."""
    sequences = [
        inference_pb2.SequenceProgress(token_ids=sequence.token_ids, text_length=sequence.text_length)
        for sequence in received.sequences
    ]
    return inference_pb2.Resume(sequences=sequences, system_fingerprint=received.fingerprint)


def error_of(error: grpc.aio.AioRpcError) -> HoldfastError:
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
    if code is grpc.StatusCode.ABORTED:
        return RequestSupersededError(message)
    if code is grpc.StatusCode.CANCELLED:
        return RequestAbortedError(message)
    return InternalError(f"{code.name}: {message}")


def is_worth_another_try(error: grpc.aio.AioRpcError) -> bool:
    """Whether the same call may succeed at another router, or later: where a router, a replica or the way was lost.

    The codes of a bug count only if nobody said so: then it is the connection that broke in a way of its own.
    """
    if error.code() in _BROKEN_CODES:
        return True
    return error.code() in _BUG_CODES and rpc_status.from_call(error) is None  # type: ignore[arg-type]


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it asks for less than a Call
    info = RetryInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return float(info.retry_delay.ToTimedelta().total_seconds())
    return _DEFAULT_RETRY_S
