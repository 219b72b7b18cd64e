"""Between the messages of the link to replicas and plain data, both ways.

What may live here: field by field conversion, kept lean, for it runs once a step or more. What may not: decisions, IO
(`link.py`), the public API (`wire.py`).
"""

from dataclasses import fields
from typing import Final

from holdfast.router.events import (
    AttemptDelta,
    AttemptRejection,
    Likelihood,
    ReplicaFacts,
    ReplicaStats,
    SendAbort,
    SendSubmit,
    StepNews,
)
from holdfast.v1 import engine_pb2, inference_pb2
from holdfast.worker.errors import (
    DeadlineExceededError,
    HoldfastError,
    InvalidRequestError,
    QueueFullError,
    ReplicaError,
)
from holdfast.worker.request import EngineLoad, FinishReason, TokenLogprob
from holdfast.worker.sampling_fields import TOKEN_WORLD, fields_of
from holdfast.worker.suspicion import Suspicion

_FINISH_REASONS: Final = {
    int(inference_pb2.FINISH_REASON_UNSPECIFIED): None,
    int(inference_pb2.FINISH_REASON_STOP): FinishReason.STOP,
    int(inference_pb2.FINISH_REASON_LENGTH): FinishReason.LENGTH,
    int(inference_pb2.FINISH_REASON_ABORT): FinishReason.ABORT,
}

_SUSPICIONS: Final = {
    Suspicion.NONE: engine_pb2.SUSPICION_UNSPECIFIED,
    Suspicion.SUSPECT: engine_pb2.SUSPICION_SUSPECT,
    Suspicion.ON_TRIAL: engine_pb2.SUSPICION_ON_TRIAL,
}


class ReplicaRefusal(InvalidRequestError):
    """A field that a replica refused. The value is not on the wire."""

    def __init__(self, field: str, limit: str) -> None:
        HoldfastError.__init__(self, f"{field}: {limit}")
        self.field = field
        self.value = None
        self.limit = limit


# --- down ---


def submit_message(action: SendSubmit) -> engine_pb2.LinkRequest:
    request = action.request
    draw = engine_pb2.DrawSettings(
        bad_words=[engine_pb2.TokenSequence(ids=word) for word in request.bad_word_token_ids],
        grammar=request.grammar,
        **fields_of(request.sampling_params, engine_pb2.DrawSettings, TOKEN_WORLD),
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
        suspicion=_SUSPICIONS[request.suspicion],
    )
    return engine_pb2.LinkRequest(submit=submit)


def abort_message(action: SendAbort) -> engine_pb2.LinkRequest:
    return engine_pb2.LinkRequest(abort=engine_pb2.Abort(attempt=action.attempt))


def follow_cache_message() -> engine_pb2.LinkRequest:
    return engine_pb2.LinkRequest(follow_cache=engine_pb2.FollowCache())


# --- up ---


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
        answers_digest=hello.answers_digest,
        eos_token_ids=frozenset(hello.eos_token_ids),
    )


def engine_load(load: engine_pb2.Load) -> EngineLoad:
    return EngineLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_free_blocks=load.num_free_blocks,
        num_total_blocks=load.num_total_blocks,
        num_foreign_suspects=load.num_foreign_suspects,
    )


def step_news(update: engine_pb2.StepUpdate) -> StepNews:
    deltas = [
        AttemptDelta(
            attempt=delta.attempt,
            first_token_index=delta.first_token_index,
            token_ids=tuple(delta.token_ids),
            finish_reason=_FINISH_REASONS[delta.finish_reason],
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
