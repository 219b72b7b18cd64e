"""Between a client's plain data and the messages of the public API, field by field.

What may not live here: calls (`client.py`), and statuses (`statuses.py`).
"""

from collections.abc import Iterable, Sequence
from typing import Final

from holdfast.cluster.client.generation import Chunk, GeneratedSequence, Generation
from holdfast.cluster.client.received import Received
from holdfast.router.events import Usage
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import FinishReason, Priority, TokenLogprob
from holdfast.worker.sampling_fields import fields_of
from holdfast.worker.sampling_params import SamplingParams

_FINISH_REASONS: Final = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_FINISH_NUMBERS: Final = {reason: number for number, reason in _FINISH_REASONS.items()}
_PRIORITIES: Final = {
    Priority.CRITICAL: inference_pb2.PRIORITY_CRITICAL,
    Priority.HIGH: inference_pb2.PRIORITY_HIGH,
    Priority.NORMAL: inference_pb2.PRIORITY_NORMAL,
    Priority.LOW: inference_pb2.PRIORITY_LOW,
}


def generate_request(
    prompt: str | Sequence[int],
    params: SamplingParams,
    *,
    model: str,
    request_id: str,
    priority: Priority = Priority.NORMAL,
    timeout_s: float | None = None,
    tenant: str = "",
    cache_salt: str = "",
) -> inference_pb2.GenerateRequest:
    """Raises `InvalidRequestError` for a timeout that is over before it begins."""
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidRequestError("timeout_s", timeout_s, "must be above 0")
    request = inference_pb2.GenerateRequest(
        model=model,
        request_id=request_id,
        sampling_params=sampling_params(params),
        priority=_PRIORITIES[priority],
        tenant=tenant,
        cache_salt=cache_salt,
        attempt=1,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    set_timeout(request, timeout_s)
    return request


def resubmission(
    request: inference_pb2.GenerateRequest, time_left_s: float | None, received: Received | None = None
) -> inference_pb2.GenerateRequest:
    """The same request once more: after what was received of it, or from its beginning."""
    again = inference_pb2.GenerateRequest()
    again.CopyFrom(request)
    again.attempt += 1
    if received is not None:
        again.resume.CopyFrom(resume(received))
    set_timeout(again, time_left_s)
    return again


def set_timeout(request: inference_pb2.GenerateRequest, timeout_s: float | None) -> None:
    """At least a millisecond; None leaves it to the server."""
    if timeout_s is not None:
        request.timeout_ms = max(1, round(1000 * timeout_s))


def resume(received: Received) -> inference_pb2.Resume:
    """What a client has of a stream, for the router that is to go on with it."""
    sequences = [
        inference_pb2.SequenceProgress(
            token_ids=sequence.token_ids,
            text_length=sequence.text_length,
            finish_reason=None if sequence.finish_reason is None else _FINISH_NUMBERS[sequence.finish_reason],
        )
        for sequence in received.sequences
    ]
    return inference_pb2.Resume(sequences=sequences, system_fingerprint=received.fingerprint)


def sampling_params(params: SamplingParams) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(**fields_of(params, inference_pb2.SamplingParams))


def chunk(message: inference_pb2.GenerateStreamResponse, params: SamplingParams) -> Chunk:
    """`params` are those of the request."""
    begins = message.sequence_index == 0 and message.first_token_index == 0
    return Chunk(
        request_id=message.request_id,
        sequence_index=message.sequence_index,
        first_token_index=message.first_token_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        logprobs=tuple(_logprob(item) for item in message.logprobs),
        prompt_logprobs=_prompt_logprobs(message.prompt_logprobs, params) if begins else (),
        usage=_usage(message.usage) if message.HasField("usage") else None,
        replayed_without_guarantee=message.replayed_without_guarantee,
        system_fingerprint=message.system_fingerprint,
    )


def generation(message: inference_pb2.GenerateResponse, params: SamplingParams) -> Generation:
    """`params` are those of the request."""
    return Generation(
        request_id=message.request_id,
        model=message.model,
        completions=tuple(_sequence(completion) for completion in message.completions),
        usage=_usage(message.usage),
        prompt_logprobs=_prompt_logprobs(message.completions[0].prompt_logprobs, params),
        replayed_without_guarantee=message.replayed_without_guarantee,
        system_fingerprint=message.system_fingerprint,
    )


def _sequence(completion: inference_pb2.Completion) -> GeneratedSequence:
    is_known = completion.HasField("cumulative_logprob")
    return GeneratedSequence(
        sequence_index=completion.sequence_index,
        token_ids=tuple(completion.token_ids),
        text=completion.text,
        finish_reason=_FINISH_REASONS[completion.finish_reason],
        logprobs=tuple(_logprob(item) for item in completion.logprobs),
        cumulative_logprob=completion.cumulative_logprob if is_known else None,
    )


def _usage(message: inference_pb2.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=message.prompt_tokens,
        num_completion_tokens=message.completion_tokens,
        num_cached_tokens=message.cached_prompt_tokens,
    )


def _prompt_logprobs(
    items: Iterable[inference_pb2.TokenLogprob], params: SamplingParams
) -> tuple[TokenLogprob | None, ...]:
    """With None for the first token, of which no model can say anything."""
    return () if params.prompt_logprobs is None else (None, *(_logprob(item) for item in items))


def _logprob(item: inference_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple((best.token_id, best.logprob) for best in item.top)
    return TokenLogprob(token_id=item.token_id, logprob=item.logprob, rank=item.rank, top=top)
