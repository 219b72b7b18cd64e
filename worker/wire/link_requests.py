"""Link requests: messages from a router to a replica, as plain data and as protobuf, for both ends.

An attempt crosses the wire as its number alone, which is the router's key of it; the replica combines it with the
link's name (`AttemptKey`), since each router counts for itself. The same holds for groups.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, TypeVar

from holdfast.v1 import engine_pb2
from holdfast.worker.adapter import Adapter
from holdfast.worker.errors import (
    InvalidRequestError,
)
from holdfast.worker.log_level import LogLevel
from holdfast.worker.parameters import MAX_LOGPROB_TOKEN_IDS
from holdfast.worker.pooling import PoolingParams
from holdfast.worker.request import (
    BlockSource,
    EngineRequest,
    GroupKey,
    KeptPrefix,
    PoisonRisk,
    Priority,
)
from holdfast.worker.wire.bound import Bound
from holdfast.worker.wire.message_bounds import Bounds
from holdfast.worker.wire.sampling_fields import TOKEN_SCOPE, fields_of, params_of

Kind = TypeVar("Kind", bound=IntEnum)


# --- at the router's end ---


def fetch_ahead_message(attempt: int, request: EngineRequest) -> engine_pb2.LinkRequest:
    """A request whose blocks are fetched before it comes, and its attempt that runs elsewhere."""
    return engine_pb2.LinkRequest(fetch_ahead=submit_message(attempt, request).submit)


def submit_message(attempt: int, request: EngineRequest) -> engine_pb2.LinkRequest:
    """Message that submits a request as attempt number `attempt`."""
    submit = engine_pb2.Submit(
        attempt=attempt,
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        sampling_params=_sampling_params_message(request),
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        time_left_ms=None if request.time_left_s is None else round(1000 * request.time_left_s),
        group_id=str(request.group_id),
        suspicion=int(request.poison_risk),  # type: ignore[arg-type]  # the numbers are those of the message's enum
        traceparent=request.traceparent,
        cache_ttl_s=request.cache_ttl_s,
        cache_prefix_tokens=request.cache_prefix_tokens,
        cache_marks=[
            engine_pb2.CacheMark(num_tokens=kept.num_tokens, ttl_s=kept.ttl_s) for kept in request.cache_marks
        ],
        adapter=None if request.adapter is None else engine_pb2.Adapter(**request.adapter._asdict()),
        block_source=_source_message(request.block_source),
        pooling=None if request.pooling is None else _pooling_message(request.pooling),
        second_start=request.second_start,
    )
    return engine_pb2.LinkRequest(submit=submit)


def _pooling_message(params: PoolingParams) -> engine_pb2.PoolingParams:
    message = engine_pb2.PoolingParams(dimensions=params.dimensions)
    if params.use_activation is not None:
        message.use_activation = params.use_activation
    return message


def _source_message(source: BlockSource | None) -> engine_pb2.BlockSource | None:
    return None if source is None else engine_pb2.BlockSource(**source._asdict())


def abort_message(attempt: int) -> engine_pb2.LinkRequest:
    return engine_pb2.LinkRequest(abort=engine_pb2.Abort(attempt=attempt))


def follow_cache_message() -> engine_pb2.LinkRequest:
    return engine_pb2.LinkRequest(follow_cache=engine_pb2.FollowCache())


def set_log_level_message(level: LogLevel) -> engine_pb2.LinkRequest:
    return engine_pb2.LinkRequest(set_log_level=engine_pb2.SetLogLevel(level=level))


def keep_adapters_message(adapters: Iterable[Adapter]) -> engine_pb2.LinkRequest:
    """The message that names the adapters which stay resident."""
    kept = [engine_pb2.Adapter(**one._asdict()) for one in adapters]
    return engine_pb2.LinkRequest(keep_adapters=engine_pb2.KeepAdapters(adapters=kept))


def kept_adapters(message: engine_pb2.KeepAdapters) -> tuple[Adapter, ...]:
    """Raises `InvalidRequestError` for one without a name, a digest or a folder."""
    return tuple(map(_adapter, message.adapters))


def kill_message() -> engine_pb2.LinkRequest:
    return engine_pb2.LinkRequest(kill=engine_pb2.Kill())


def take_pins_message(address: str) -> engine_pb2.LinkRequest:
    return engine_pb2.LinkRequest(take_pins=engine_pb2.TakePins(address=address))


def _sampling_params_message(request: EngineRequest) -> engine_pb2.EngineSamplingParams:
    return engine_pb2.EngineSamplingParams(
        **fields_of(request.sampling_params, engine_pb2.EngineSamplingParams, TOKEN_SCOPE),
        bad_words=[engine_pb2.TokenSequence(ids=word) for word in request.bad_word_token_ids],
        grammar=request.grammar,
    )


# --- at the replica's end: the border of trust, where all that a router says is checked, once ---

_TOKENS: Final = Bound(count=2**23)
_NAME: Final = Bound(size=2**16)

LINK_BOUNDS: Final[Bounds] = {
    "holdfast.v1.Submit": {
        "prompt_token_ids": _TOKENS,
        "output_token_ids": _TOKENS,
        "cache_marks": Bound(count=2**4),
        **dict.fromkeys(("cache_salt", "tenant", "group_id", "request_id", "traceparent"), _NAME),
    },
    "holdfast.v1.EngineSamplingParams": {
        "stop_token_ids": _TOKENS,
        "logprob_token_ids": Bound(count=MAX_LOGPROB_TOKEN_IDS),
        "logit_bias": Bound(count=2**15),
        "allowed_token_ids": _TOKENS,
        "bad_words": Bound(count=2**14),
        "grammar": Bound(size=2**24),
    },
    "holdfast.v1.Adapter": dict.fromkeys(("name", "digest", "path"), _NAME),
    "holdfast.v1.KeepAdapters": {"adapters": Bound(count=2**10)},
    "holdfast.v1.BlockSource": {"address": _NAME},
    "holdfast.v1.TakePins": {"address": _NAME},
    "holdfast.v1.GetPinsRequest": {"kind": _NAME},
    "holdfast.v1.EndPinsRequest": dict.fromkeys(("tenant", "prefix"), _NAME),
    "holdfast.v1.TokenSequence": {"ids": Bound(count=2**20)},
    "holdfast.v1.SetLogLevel": {"level": _NAME},
    "holdfast.v1.SendBlocksRequest": {
        **dict.fromkeys(("kind", "numbers"), _NAME),
        "names": Bound(size=2**22),
        "heads": Bound(count=2**10),
    },
    "holdfast.v1.RankHeads": {"counts": Bound(count=2**12), "heads": Bound(count=2**18)},
}
"""Bounds of a router's messages: wide, for routers hold their clients to narrower ones."""


def engine_request(submit: engine_pb2.Submit, link: str, vocab_size: int) -> EngineRequest:
    """Request from the link of that name. Raises `InvalidRequestError`, by field, for values that an engine must not
    get.
    """
    if not submit.prompt_token_ids:
        raise InvalidRequestError("prompt", (), "must have at least one token")
    params = submit.sampling_params
    request = EngineRequest(
        request_id=submit.request_id,
        prompt_token_ids=tuple(submit.prompt_token_ids),
        sampling_params=params_of(params, TOKEN_SCOPE),
        priority=_member(Priority, "priority", submit.priority),
        output_token_ids=tuple(submit.output_token_ids),
        cache_salt=submit.cache_salt,
        tenant=submit.tenant,
        time_left_s=submit.time_left_ms / 1000 if submit.HasField("time_left_ms") else None,
        bad_word_token_ids=tuple(tuple(word.ids) for word in params.bad_words),
        grammar=params.grammar,
        group_id=GroupKey(link, submit.group_id) if submit.group_id else "",
        poison_risk=_member(PoisonRisk, "suspicion", submit.suspicion),
        traceparent=submit.traceparent,
        cache_ttl_s=submit.cache_ttl_s,
        cache_prefix_tokens=submit.cache_prefix_tokens,
        cache_marks=tuple([KeptPrefix(mark.num_tokens, mark.ttl_s) for mark in submit.cache_marks]),
        adapter=_adapter(submit.adapter) if submit.HasField("adapter") else None,
        block_source=_source(submit),
        pooling=_pooling(submit.pooling) if submit.HasField("pooling") else None,
        second_start=submit.second_start,
    )
    if request.sampling_params.seed is None:  # clients' -1, which routers replace
        raise InvalidRequestError("sampling_params.seed", params.seed, "must be at least 0 on a link")
    _check_vocabulary(request, vocab_size)
    return request


def _adapter(message: engine_pb2.Adapter) -> Adapter:
    if not (message.name and message.digest and message.path):
        raise InvalidRequestError("adapter", message.name, "must have a name, a digest and a path")
    return Adapter(message.name, message.digest, message.path, message.pinned)


def _pooling(message: engine_pb2.PoolingParams) -> PoolingParams:
    return PoolingParams(
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        use_activation=message.use_activation if message.HasField("use_activation") else None,
    )


def _source(submit: engine_pb2.Submit) -> BlockSource | None:
    if not submit.HasField("block_source"):
        return None
    found = submit.block_source
    return BlockSource(found.address, found.num_tokens, found.is_computing, found.block_size, found.is_leaving)


def _member(kind: type[Kind], field: str, number: int) -> Kind:
    try:
        return kind(number)
    except ValueError:
        raise InvalidRequestError(field, number, f"must be one of {', '.join(map(str, map(int, kind)))}") from None


def _check_vocabulary(request: EngineRequest, vocab_size: int) -> None:
    """A token id beyond the model's vocabulary would bring the engine down, and not only its own request."""
    params = request.sampling_params
    checked: tuple[tuple[str, Iterable[int]], ...] = (
        ("prompt", request.prompt_token_ids),
        ("output_token_ids", request.output_token_ids),
        ("sampling_params.stop_token_ids", params.stop_token_ids),
        ("sampling_params.logprob_token_ids", params.logprob_token_ids),
        ("sampling_params.logit_bias", params.logit_bias),
        ("sampling_params.allowed_token_ids", params.allowed_token_ids or ()),
        ("sampling_params.bad_words", (token_id for word in request.bad_word_token_ids for token_id in word)),
    )
    for field, token_ids in checked:
        largest = max(token_ids, default=0)
        if largest >= vocab_size:
            raise InvalidRequestError(field, largest, f"token ids must be below the vocabulary's size, {vocab_size}")
