"""Between protobuf messages and plain data, both ways, for the public API and for the link to replicas.

What may live here: field by field conversion, and refusing what a field must not hold. What may not: decisions, IO,
checks that need a model (`intake.py`). Conversions of the link run once a step or more and are kept lean.
"""

import struct
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Final

from holdfast_pb import engine_pb2, inference_pb2
from router.answer import Answer, Completion
from router.events import (
    AttemptDelta,
    AttemptRejection,
    Deliver,
    Likelihood,
    ModelStatus,
    ReplicaFacts,
    ReplicaLoad,
    ReplicaStats,
    SendAbort,
    SendSubmit,
    StepNews,
    Usage,
)
from router.request import GenerationRequest
from router.resume import Progress, Resume
from worker.errors import (
    DeadlineExceededError,
    HoldfastError,
    InvalidRequestError,
    QueueFullError,
    ReplicaError,
)
from worker.request import EngineLoad, FinishReason, Priority, SamplingParams, TokenLogprob

_PRIORITIES: Final = {
    inference_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    inference_pb2.PRIORITY_CRITICAL: Priority.CRITICAL,
    inference_pb2.PRIORITY_HIGH: Priority.HIGH,
    inference_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    inference_pb2.PRIORITY_LOW: Priority.LOW,
}
_TO_FINISH_REASON: Final = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}
_OPTIONAL: Final = (
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "skip_special_tokens",
    "logprobs",
    "n",
    "best_of",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "beam_width",
)
_OPTIONAL_FLOATS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "length_penalty",
)
_FROM_FINISH_REASON: Final = {int(number): reason for reason, number in _TO_FINISH_REASON.items()}


class ReplicaRefusal(InvalidRequestError):
    """A field that a replica refused. The value is not on the wire."""

    def __init__(self, field: str, limit: str) -> None:
        HoldfastError.__init__(self, f"{field}: {limit}")
        self.field = field
        self.value = None
        self.limit = limit


# --- the public API, in ---


def generation_request(message: inference_pb2.GenerateRequest) -> GenerationRequest:
    """Raises `InvalidRequestError`, naming the field."""
    priority = _PRIORITIES.get(message.priority)
    if priority is None:
        raise InvalidRequestError("priority", message.priority, "must be a value of holdfast.v1.Priority")
    return GenerationRequest(
        prompt=_prompt(message),
        model=message.model,
        request_id=message.request_id,
        sampling_params=_sampling_params(message.sampling_params),
        priority=priority,
        timeout_s=message.timeout_ms / 1000 if message.HasField("timeout_ms") else None,
        cache_salt=message.cache_salt,
        resume=_resume(message.resume) if message.HasField("resume") else None,
        tenant=message.tenant,
        attempt=message.attempt,
    )


def _resume(message: inference_pb2.Resume) -> Resume:
    return Resume(sequences=tuple(map(_progress, message.sequences)), fingerprint=message.system_fingerprint)


def _progress(message: inference_pb2.SequenceProgress) -> Progress:
    return Progress(
        token_ids=tuple(message.token_ids),
        text_length=message.text_length,
        finish_reason=_FROM_FINISH_REASON.get(message.finish_reason),
    )


def _prompt(message: inference_pb2.GenerateRequest) -> str | tuple[int, ...]:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return tuple(message.token_ids.ids)
        case _:
            raise InvalidRequestError("prompt", None, "one of text and token_ids must be set")


def _sampling_params(message: inference_pb2.SamplingParams) -> SamplingParams:
    """Only what is set overrides a default: zero means something."""
    params = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    params |= {name: _shortest_decimal(getattr(message, name)) for name in _OPTIONAL_FLOATS if message.HasField(name)}
    if message.no_max_tokens:
        _check_no_max_tokens(message)
        params["max_tokens"] = None
    return SamplingParams(
        **params,
        echo=message.echo,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias={token_id: _shortest_decimal(bias) for token_id, bias in message.logit_bias.items()},
        allowed_token_ids=message.allowed_token_ids or None,
        bad_words=message.bad_words,
        include_stop_str_in_output=message.include_stop_str_in_output,
        structured_outputs=_structured(message.structured_outputs) if message.HasField("structured_outputs") else None,
    )


def _check_no_max_tokens(message: inference_pb2.SamplingParams) -> None:
    if message.HasField("max_tokens"):
        limit = "must not be set with no_max_tokens"
        raise InvalidRequestError("sampling_params.max_tokens", message.max_tokens, limit)


def _structured(message: inference_pb2.StructuredOutputs) -> dict[str, object]:
    kind = message.WhichOneof("kind")
    if kind is None:
        return {}
    return {kind: tuple(message.choice.texts) if kind == "choice" else getattr(message, kind)}


def _shortest_decimal(value: float) -> float:
    """The double that a 32-bit float was most likely written as: 0.7 rather than 0.699999988.

    So a request draws the same tokens over the wire as in process, where parameters are doubles.
    """
    for num_digits in (6, 7, 8):
        short = float(f"{value:.{num_digits}g}")
        if struct.pack("f", short) == struct.pack("f", value):
            return short
    return value


# --- the public API, out ---


def stream_response(delivery: Deliver) -> inference_pb2.GenerateStreamResponse:
    message = inference_pb2.GenerateStreamResponse(
        request_id=delivery.request_id,
        sequence_index=delivery.sequence_index,
        first_token_index=delivery.first_token_index,
        token_ids=delivery.token_ids,
        text=delivery.text,
        finish_reason=_TO_FINISH_REASON[delivery.finish_reason],
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
        finish_reason=_TO_FINISH_REASON[output.finish_reason],
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


# --- the link, down ---


def submit_message(action: SendSubmit) -> engine_pb2.LinkRequest:
    request, params = action.request, action.request.sampling_params
    draw = engine_pb2.DrawSettings(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        max_tokens=params.max_tokens or 0,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_p=params.min_p,
        min_tokens=params.min_tokens,
        repetition_penalty=None if params.repetition_penalty == 1 else params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=[engine_pb2.TokenSequence(ids=word) for word in request.bad_word_token_ids],
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=request.grammar,
    )
    submit = engine_pb2.Submit(
        attempt=action.attempt,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        draw=draw,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        time_left_ms=None if request.time_left_s is None else round(1000 * request.time_left_s),
        group_id=request.group_id,
    )
    return engine_pb2.LinkRequest(submit=submit)


def abort_message(action: SendAbort) -> engine_pb2.LinkRequest:
    return engine_pb2.LinkRequest(abort=engine_pb2.Abort(attempt=action.attempt))


def follow_cache_message() -> engine_pb2.LinkRequest:
    return engine_pb2.LinkRequest(follow_cache=engine_pb2.FollowCache())


# --- the link, up ---


def replica_facts(hello: engine_pb2.Hello) -> ReplicaFacts:
    return ReplicaFacts(
        replica_id=hello.replica_id,
        model=hello.model,
        max_model_len=hello.max_model_len,
        vocab_size=hello.vocab_size,
        tensor_parallel_size=hello.tensor_parallel_size,
        block_size=hello.block_size,
        num_blocks=hello.num_blocks,
        row_invariant=hello.row_invariant,
        numerics=hello.numerics,
        eos_token_ids=frozenset(hello.eos_token_ids),
    )


def engine_load(load: engine_pb2.Load) -> EngineLoad:
    return EngineLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_free_blocks=load.num_free_blocks,
        num_total_blocks=load.num_total_blocks,
    )


def step_news(update: engine_pb2.StepUpdate) -> StepNews:
    deltas = [
        AttemptDelta(
            attempt=delta.attempt,
            first_token_index=delta.first_token_index,
            token_ids=tuple(delta.token_ids),
            finish_reason=_FROM_FINISH_REASON[delta.finish_reason],
            num_cached_tokens=delta.num_cached_tokens,
            logprobs=_logprobs(delta) if delta.logprobs else (),
            prompt_logprobs=[Likelihood(item.logprob, item.rank, _top_tokens(item)) for item in delta.prompt_logprobs],
        )
        for delta in update.deltas
    ]
    rejections = [
        AttemptRejection(attempt=rejection.attempt, error=_rejection_error(rejection))
        for rejection in update.rejections
    ]
    return StepNews(
        load=engine_load(update.load),
        deltas=deltas,
        rejections=rejections,
        stored=update.cache_events.stored,
        evicted=update.cache_events.evicted,
        stats=_replica_stats(update.stats) if update.HasField("stats") else None,
    )


def _replica_stats(stats: engine_pb2.EngineStats) -> ReplicaStats:
    """The fields have the same names."""
    return ReplicaStats(**{item.name: getattr(stats, item.name) for item in fields(ReplicaStats)})


def _logprobs(delta: engine_pb2.Delta) -> tuple[TokenLogprob, ...]:
    """Raises ValueError if there is not one for each token."""
    return tuple(
        TokenLogprob(
            token_id=token_id,
            logprob=item.logprob,
            rank=item.rank,
            top=_top_tokens(item),
        )
        for token_id, item in zip(delta.token_ids, delta.logprobs, strict=True)
    )


def _top_tokens(item: engine_pb2.DrawnLogprob) -> tuple[tuple[int, float], ...]:
    return tuple(zip(item.top_token_ids, item.top_logprobs, strict=True))


def _rejection_error(rejection: engine_pb2.Rejection) -> HoldfastError:
    if rejection.field:
        return ReplicaRefusal(rejection.field, rejection.message)
    if rejection.deadline_exceeded:
        return DeadlineExceededError(rejection.message)
    if rejection.retry_after_ms:
        return QueueFullError(rejection.message, rejection.retry_after_ms / 1000)
    return ReplicaError(rejection.message)
