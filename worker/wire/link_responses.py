"""Link responses: messages from a replica to a router, as plain data and as protobuf, for both ends."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from holdfast.v1 import engine_pb2
from holdfast.worker.adapter import Adapter
from holdfast.worker.errors import (
    CapacityError,
    DeadlineExceededError,
    HoldfastError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    ReplicaError,
)
from holdfast.worker.model_info import ModelInfo, ReplicaFacts
from holdfast.worker.pooling import PoolingActivation, PoolingFacts, PoolingKind, PoolingTask
from holdfast.worker.request import (
    AttemptKey,
    EngineLoad,
    FinishReason,
    TokenDelta,
    TokenLogprob,
)
from holdfast.worker.step_update import (
    NO_CHANGES,
    NO_STEPS,
    CacheChanges,
    EngineStats,
    FetchedAhead,
    Heartbeat,
    Hello,
    PlainTokens,
    Rejection,
    StepUpdate,
)
from holdfast.worker.wire.delta_pieces import delta_pieces

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

MAX_CACHE_EVENTS: Final = 4096
"""Most cache events of one message: 32 KiB, so that a large cache's snapshot comes in pieces."""

_FINISH_CODES: Final[Mapping[FinishReason | None, int]] = {
    None: 0,
    FinishReason.STOP: 1,
    FinishReason.LENGTH: 2,
    FinishReason.ABORT: 3,
}
_FINISH_REASONS: Final = {code: reason for reason, code in _FINISH_CODES.items()}
_INFO_NAMES: Final = tuple(item.name for item in fields(ModelInfo))
_OWN_FORM: Final = ("eos_token_ids", "adapters", "pooling")
_LOAD_NAMES: Final = tuple(item.name for item in fields(EngineLoad))
_STATS_NAMES: Final = tuple(item.name for item in fields(EngineStats))
_COUNTS: Final = ("max_model_len", "vocab_size", "tensor_parallel_size", "block_size", "num_blocks")


class LinkMessageError(ReplicaError):
    """The other end of a link has said what cannot be read. The message names the field, the value and the limit."""


class ReplicaRefusal(InvalidRequestError):
    """A field that a replica refused. The value is not on the wire."""

    def __init__(self, field: str, limit: str) -> None:
        HoldfastError.__init__(self, f"{field}: {limit}")
        self.field = field
        self.value = None
        self.limit = limit


# --- at the replica's end ---


def hello_message(hello: Hello) -> engine_pb2.LinkResponse:
    """Protobuf message of `Hello`; times in ms."""
    facts = hello.facts
    message = engine_pb2.Hello(
        replica_id=facts.replica_id,
        load=_load_message(hello.load),
        heartbeat_ms=round(1000 * hello.heartbeat_s),
        frozen_after_ms=round(1000 * hello.frozen_after_s),
        **{name: getattr(facts, name) for name in _INFO_NAMES if name not in _OWN_FORM},
        eos_token_ids=sorted(facts.eos_token_ids),
        adapters=[engine_pb2.Adapter(**adapter._asdict()) for adapter in facts.adapters],
        pooling=None if facts.pooling is None else engine_pb2.PoolingFacts(**facts.pooling._asdict()),
    )
    return engine_pb2.LinkResponse(hello=message)


def heartbeat_message(heartbeat: Heartbeat) -> engine_pb2.LinkResponse:
    """Protobuf message of `Heartbeat`; times in seconds."""
    message = engine_pb2.Heartbeat(
        progress=heartbeat.progress, expected_gap_s=heartbeat.expected_gap_s, starved_s=heartbeat.starved_s
    )
    return engine_pb2.LinkResponse(heartbeat=message)


def step_messages(update: StepUpdate) -> Iterator[engine_pb2.LinkResponse]:
    """One message; several if the cache changes or log-probabilities do not fit into one.

    Messages are filled in place: putting a finished message into another one copies it.
    """
    first, *others = update.cache.parts(MAX_CACHE_EVENTS)
    message = _step_message(update, first)
    plain, rest = PlainTokens.split(update.deltas)
    deltas, *later = delta_pieces(rest)
    message.step.plain_attempts.extend(map(attempt_number, plain.attempts))
    message.step.plain_token_indices.extend(plain.token_indices)
    message.step.plain_token_ids.extend(plain.token_ids)
    _add_deltas(message, deltas)
    message.step.rejections.extend(map(_rejection_message, update.rejections))
    message.step.fetched_attempts.extend(attempt_number(one.attempt) for one in update.fetched_ahead)
    message.step.fetched_tokens.extend(one.num_tokens for one in update.fetched_ahead)
    if update.stats is not None:
        message.step.stats.CopyFrom(_stats_message(update.stats))
    yield message
    for part in others:
        yield _step_message(update, part)
    for deltas in later:
        message = _step_message(update, NO_CHANGES)
        _add_deltas(message, deltas)
        yield message


def _add_deltas(message: engine_pb2.LinkResponse, deltas: Sequence[TokenDelta]) -> None:
    added = message.step.deltas
    for delta in deltas:
        _add_delta(added, delta)


def _step_message(update: StepUpdate, changes: CacheChanges) -> engine_pb2.LinkResponse:
    """The load, which says that there is an update at all, and changes of the cache."""
    message = engine_pb2.LinkResponse()
    step, load = message.step, update.load
    step.step_id = update.step_id
    step.load.SetInParent()
    for name in _LOAD_NAMES:
        setattr(step.load, name, getattr(load, name))
    if changes:
        step.cache_events.stored.extend(changes.stored)
        step.cache_events.evicted.extend(changes.evicted)
    return message


def attempt_number(attempt: Hashable) -> int:
    """The router's number of an attempt, which crosses the wire alone."""
    assert isinstance(attempt, AttemptKey), f"{attempt!r} was not submitted over a link"
    return attempt.number


def _add_delta(deltas: "RepeatedCompositeFieldContainer[engine_pb2.Delta]", delta: TokenDelta) -> None:
    """Adds a delta. Fields that most deltas do not have cost nothing where they are absent."""
    message = deltas.add(
        attempt=attempt_number(delta.attempt), first_token_index=delta.first_token_index, token_ids=delta.token_ids
    )
    if delta.finish_reason is not None:
        message.finish_reason = _FINISH_CODES[delta.finish_reason]
    if delta.num_cached_tokens:
        message.num_cached_tokens = delta.num_cached_tokens
    if delta.logprobs:
        message.logprobs.extend(map(_logprob_message, delta.logprobs))
    if delta.prompt_logprobs:
        message.prompt_logprobs.extend([_logprob_message(item, item.token_id) for item in delta.prompt_logprobs])
    if delta.queued_s:
        message.queued_s = delta.queued_s
    if delta.num_disk_tokens:
        message.num_disk_tokens = delta.num_disk_tokens
    if delta.num_draft_tokens:
        message.num_draft_tokens, message.num_accepted_tokens = delta.num_draft_tokens, delta.num_accepted_tokens
    if delta.pooled:
        message.pooled = delta.pooled


def _logprob_message(item: TokenLogprob, token_id: int = 0) -> engine_pb2.EngineTokenLogprob:
    return engine_pb2.EngineTokenLogprob(
        token_id=token_id,
        logprob=item.logprob,
        rank=item.rank,
        top_token_ids=[best for best, _ in item.top],
        top_logprobs=[logprob for _, logprob in item.top],
    )


def _rejection_message(rejection: Rejection) -> engine_pb2.Rejection:
    error, attempt = rejection.error, attempt_number(rejection.attempt)
    if isinstance(error, InvalidRequestError):
        return engine_pb2.Rejection(attempt=attempt, field=error.field, message=error.limit)
    return engine_pb2.Rejection(
        attempt=attempt,
        message=str(error),
        retry_after_ms=max(1, round(1000 * (error.retry_after_s or 0))) if isinstance(error, CapacityError) else 0,
        deadline_exceeded=isinstance(error, DeadlineExceededError),
        is_final=isinstance(error, InternalError),
    )


def _load_message(load: EngineLoad) -> engine_pb2.Load:
    return engine_pb2.Load(**{name: getattr(load, name) for name in _LOAD_NAMES})


def _stats_message(stats: EngineStats) -> engine_pb2.EngineStats:
    return engine_pb2.EngineStats(**{name: getattr(stats, name) for name in _STATS_NAMES})


# --- at the router's end ---


def read_response(message: engine_pb2.LinkResponse | None) -> Hello | StepUpdate | Heartbeat:
    """Message of a replica; None stands for bytes that are no message. Raises `LinkMessageError`."""
    kind = None if message is None else message.WhichOneof("message")
    if message is None or kind is None:
        raise LinkMessageError("bytes that cannot be parsed, or a message of an unknown kind")
    if kind == "step":
        return _step_update(message.step)
    return _heartbeat(message.heartbeat) if kind == "heartbeat" else _hello(message.hello)


def _hello(hello: engine_pb2.Hello) -> Hello:
    _check_hello(hello)
    known = {name: getattr(hello, name) for name in _INFO_NAMES if name not in _OWN_FORM}
    adapters = tuple(Adapter(one.name, one.digest, one.path, one.pinned) for one in hello.adapters)
    eos = frozenset(hello.eos_token_ids)
    return Hello(
        facts=ReplicaFacts(
            replica_id=hello.replica_id,
            eos_token_ids=eos,
            adapters=adapters,
            pooling=_pooling_facts(hello.pooling) if hello.HasField("pooling") else None,
            **known,
        ),
        load=_engine_load(hello.load),
        heartbeat_s=hello.heartbeat_ms / 1000,
        frozen_after_s=hello.frozen_after_ms / 1000,
    )


def _pooling_facts(message: engine_pb2.PoolingFacts) -> PoolingFacts:
    try:
        return PoolingFacts(
            task=PoolingTask(message.task),
            kind=PoolingKind(message.kind),
            activation=PoolingActivation(message.activation),
            num_outputs=message.num_outputs,
            is_matryoshka=message.is_matryoshka,
            dimensions=tuple(message.dimensions),
            labels=tuple(message.labels),
            prompt=message.prompt,
            pair_template=message.pair_template,
            is_whole=message.is_whole,
        )
    except ValueError as error:
        raise LinkMessageError(f"hello.pooling: {error}") from None


def _check_hello(hello: engine_pb2.Hello) -> None:
    for name in _COUNTS:
        if getattr(hello, name) < 1:
            raise LinkMessageError(f"hello.{name} = {getattr(hello, name)}: must be at least 1")
    if hello.heartbeat_ms and not hello.frozen_after_ms:
        raise LinkMessageError("hello.frozen_after_ms = 0: must be at least 1 where there are heartbeats")


def _heartbeat(heartbeat: engine_pb2.Heartbeat) -> Heartbeat:
    for name in ("expected_gap_s", "starved_s"):
        seconds = getattr(heartbeat, name)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise LinkMessageError(f"heartbeat.{name} = {seconds}: must be a number of at least 0")
    return Heartbeat(
        progress=heartbeat.progress, expected_gap_s=heartbeat.expected_gap_s, starved_s=heartbeat.starved_s
    )


def _step_update(step: engine_pb2.StepUpdate) -> StepUpdate:
    return StepUpdate(
        load=_engine_load(step.load),
        step_id=step.step_id,
        plain=_plain_tokens(step),
        deltas=tuple([_token_delta(delta) for delta in step.deltas]),
        rejections=tuple([Rejection(attempt=item.attempt, error=_rejection_error(item)) for item in step.rejections]),
        cache=_cache_changes(step.cache_events) if step.HasField("cache_events") else NO_CHANGES,
        fetched_ahead=tuple(map(FetchedAhead, step.fetched_attempts, step.fetched_tokens)),
        stats=_engine_stats(step.stats) if step.HasField("stats") else None,
    )


def _plain_tokens(step: engine_pb2.StepUpdate) -> PlainTokens:
    columns = PlainTokens(tuple(step.plain_attempts), tuple(step.plain_token_indices), tuple(step.plain_token_ids))
    if not len(columns.attempts) == len(columns.token_indices) == len(columns.token_ids):
        counts = ", ".join(f"{len(column)} {name}" for name, column in zip(columns._fields, columns, strict=True))
        raise LinkMessageError(f"plain tokens with {counts}: there must be the same number of each")
    return columns


def _token_delta(delta: engine_pb2.Delta) -> TokenDelta:
    said, code = delta.token_ids, delta.finish_reason
    token_ids = (said[0],) if len(said) == 1 else tuple(said)  # of one, this takes half the time
    if code not in _FINISH_REASONS:
        limit = f"must be one of {', '.join(map(str, _FINISH_REASONS))}"
        raise LinkMessageError(f"finish_reason = {code}: {limit} (attempt {delta.attempt})")
    return TokenDelta(
        attempt=delta.attempt,
        first_token_index=delta.first_token_index,
        token_ids=token_ids,
        finish_reason=_FINISH_REASONS[code],
        num_cached_tokens=delta.num_cached_tokens,
        logprobs=_logprobs(delta, token_ids) if delta.logprobs else (),
        prompt_logprobs=_prompt_logprobs(delta) if delta.prompt_logprobs else (),
        queued_s=delta.queued_s,
        num_disk_tokens=delta.num_disk_tokens,
        num_draft_tokens=delta.num_draft_tokens,
        num_accepted_tokens=delta.num_accepted_tokens,
        pooled=delta.pooled,
    )


def _logprobs(delta: engine_pb2.Delta, token_ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    if len(delta.logprobs) != len(token_ids):
        count = f"{len(delta.logprobs)} logprobs for {len(token_ids)} tokens"
        raise LinkMessageError(f"{count}: there must be one for each (attempt {delta.attempt})")
    return tuple(map(_token_logprob, token_ids, delta.logprobs))


def _prompt_logprobs(delta: engine_pb2.Delta) -> tuple[TokenLogprob, ...]:
    return tuple([_token_logprob(item.token_id, item) for item in delta.prompt_logprobs])


def _token_logprob(token_id: int, item: engine_pb2.EngineTokenLogprob) -> TokenLogprob:
    if len(item.top_token_ids) != len(item.top_logprobs):
        raise LinkMessageError(f"{len(item.top_logprobs)} top_logprobs for {len(item.top_token_ids)} top_token_ids")
    top = tuple(zip(item.top_token_ids, item.top_logprobs, strict=True))
    return TokenLogprob(token_id=token_id, logprob=item.logprob, rank=item.rank, top=top)


def _rejection_error(rejection: engine_pb2.Rejection) -> HoldfastError:
    if rejection.field:
        return ReplicaRefusal(rejection.field, rejection.message)
    if rejection.deadline_exceeded:
        return DeadlineExceededError(rejection.message)
    if rejection.is_final:
        return InternalError(rejection.message)
    if rejection.retry_after_ms:
        return QueueFullError(rejection.message, rejection.retry_after_ms / 1000)
    return ReplicaError(rejection.message)


def _engine_load(load: engine_pb2.Load) -> EngineLoad:
    return EngineLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_free_blocks=load.num_free_blocks,
        num_total_blocks=load.num_total_blocks,
        num_foreign_suspects=load.num_foreign_suspects,
    )


def _cache_changes(events: engine_pb2.CacheEvents) -> CacheChanges:
    return CacheChanges(stored=tuple(events.stored), evicted=tuple(events.evicted))


def _engine_stats(stats: engine_pb2.EngineStats) -> EngineStats:
    fields = {name: getattr(stats, name) for name in _STATS_NAMES}
    fields |= {name: dict(getattr(stats, name)) for name in ("received_bytes_per_s", "received_tokens_from")}
    step_counts = tuple(stats.step_counts)
    fields["step_counts"] = step_counts if len(step_counts) == len(NO_STEPS) else NO_STEPS  # other versions count else
    return EngineStats(**fields)
