"""Between the messages of the public API and plain data, both ways.

What may live here: field by field conversion, and refusing what a field must not hold. What may not: decisions, IO,
checks that need a model (`request_processor.py`), the link to replicas (`codec.py`).
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

from holdfast.router.events import (
    Deliver,
    ModelStatus,
    ReplicaLoad,
    Usage,
)
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.answer import Answer, Completion
from holdfast.router.resume import Progress, Resume
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import (
    InvalidRequestError,
)
from holdfast.worker.request import FinishReason, Priority, TokenLogprob
from holdfast.worker.sampling_fields import params_of

_PRIORITIES: Final = {
    inference_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    inference_pb2.PRIORITY_CRITICAL: Priority.CRITICAL,
    inference_pb2.PRIORITY_HIGH: Priority.HIGH,
    inference_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    inference_pb2.PRIORITY_LOW: Priority.LOW,
}
_FINISH_REASONS: Final = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}
_RECEIVED_REASONS: Final = {
    int(value): reason for reason, value in _FINISH_REASONS.items() if reason is not FinishReason.ABORT
}
"""Those that a stream may end with: a cancelled one ends with a status."""


# --- in ---


def generation_request(message: inference_pb2.GenerateRequest) -> GenerationRequest:
    """Raises `InvalidRequestError`, naming the field."""
    priority = _PRIORITIES.get(message.priority)
    if priority is None:
        raise InvalidRequestError("priority", message.priority, "must be a value of holdfast.v1.Priority")
    return GenerationRequest(
        prompt=_prompt(message),
        model=message.model,
        request_id=message.request_id,
        sampling_params=params_of(message.sampling_params),
        priority=priority,
        timeout_s=message.timeout_ms / 1000 if message.HasField("timeout_ms") else None,
        cache_salt=message.cache_salt,
        resume=_resume(message.resume) if message.HasField("resume") else None,
        tenant=message.tenant,
        attempt=message.attempt,
    )


def _resume(message: inference_pb2.Resume) -> Resume:
    sequences = tuple(_progress(index, progress) for index, progress in enumerate(message.sequences))
    return Resume(sequences=sequences, fingerprint=message.system_fingerprint)


def _progress(index: int, message: inference_pb2.SequenceProgress) -> Progress:
    if message.finish_reason not in _RECEIVED_REASONS:
        limit = "must be unset, or what a stream's last chunk may say: FINISH_REASON_STOP or FINISH_REASON_LENGTH"
        raise InvalidRequestError(f"resume.sequences[{index}].finish_reason", message.finish_reason, limit)
    return Progress(
        token_ids=tuple(message.token_ids),
        text_length=message.text_length,
        finish_reason=_RECEIVED_REASONS[message.finish_reason],
    )


def _prompt(message: inference_pb2.GenerateRequest) -> str | tuple[int, ...]:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return tuple(message.token_ids.ids)
        case _:
            raise InvalidRequestError("prompt", None, "one of text and token_ids must be set")


# --- out ---


def stream_response(delivery: Deliver) -> inference_pb2.GenerateStreamResponse:
    message = inference_pb2.GenerateStreamResponse(
        request_id=delivery.request_id,
        sequence_index=delivery.sequence_index,
        first_token_index=delivery.first_token_index,
        token_ids=delivery.token_ids,
        text=delivery.text,
        finish_reason=_FINISH_REASONS[delivery.finish_reason],
        logprobs=[_logprob(item) for item in delivery.logprobs],
        replayed_without_guarantee=not delivery.identity_guaranteed,
        system_fingerprint=delivery.fingerprint,
        prompt_logprobs=[_logprob(item) for item in delivery.prompt_logprobs],
    )
    if delivery.usage is not None:
        message.usage.CopyFrom(_usage(delivery.usage))
    return message


def unary_response(answer: Answer) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id=answer.request_id,
        model=answer.model,
        completions=[_completion(completion) for completion in answer.completions],
        usage=_usage(answer.usage),
        replayed_without_guarantee=not all(item.output.identity_guaranteed for item in answer.completions),
        system_fingerprint=answer.completions[0].output.fingerprint,
    )


def _completion(completion: Completion) -> inference_pb2.Completion:
    output = completion.output
    return inference_pb2.Completion(
        sequence_index=output.sequence_index,
        token_ids=output.token_ids,
        text=output.text,
        finish_reason=_FINISH_REASONS[output.finish_reason],
        logprobs=[_logprob(item) for item in output.logprobs],
        prompt_logprobs=[_logprob(item) for item in output.prompt_logprobs],
        cumulative_logprob=completion.cumulative_logprob,
    )


def _logprob(item: TokenLogprob) -> inference_pb2.TokenLogprob:
    top = [inference_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in item.top]
    return inference_pb2.TokenLogprob(token_id=item.token_id, logprob=item.logprob, rank=item.rank, top=top)


def _usage(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        cached_prompt_tokens=usage.num_cached_tokens,
    )


def models_response(models: Iterable[ModelStatus]) -> inference_pb2.ListModelsResponse:
    return inference_pb2.ListModelsResponse(
        models=[
            inference_pb2.Model(
                name=model.name,
                max_model_len=model.facts.max_model_len,
                vocab_size=model.facts.vocab_size,
                num_replicas=model.num_replicas,
                tensor_parallel_size=model.facts.tensor_parallel_size,
                row_invariant=model.facts.row_invariant,
            )
            for model in models
        ]
    )


def load_response(num_queued: int, num_open: int, replicas: Iterable[ReplicaLoad]) -> inference_pb2.GetLoadResponse:
    return inference_pb2.GetLoadResponse(
        num_queued=num_queued,
        num_open=num_open,
        replicas=[
            inference_pb2.ReplicaLoad(
                replica_id=replica.replica_id,
                model=replica.model,
                num_running=replica.load.num_running,
                num_waiting=replica.load.num_waiting,
                num_free_blocks=replica.load.num_free_blocks,
                num_total_blocks=replica.load.num_total_blocks,
                stats=None if replica.stats is None else inference_pb2.ReplicaStats(**asdict(replica.stats)),
            )
            for replica in replicas
        ],
    )
