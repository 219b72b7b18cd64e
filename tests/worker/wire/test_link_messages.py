"""The messages of the link: plain data, bytes, and the same plain data again; and what is no such message."""

import math
from contextlib import suppress
from dataclasses import fields, replace
from typing import TypeVar

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from holdfast.v1 import engine_pb2
from holdfast.worker.errors import (
    DeadlineExceededError,
    HoldfastError,
    InvalidRequestError,
    QueueFullError,
    ReplicaError,
)
from holdfast.worker.log_level import LOG_LEVELS
from holdfast.worker.model_info import ModelInfo, ReplicaFacts
from holdfast.worker.parameters import MAX_LOGPROBS, MAX_SEED, MAX_WHOLE
from holdfast.worker.pooling import PoolingParams
from holdfast.worker.request import (
    AttemptKey,
    EngineLoad,
    EngineRequest,
    FinishReason,
    GroupKey,
    KeptPrefix,
    PoisonRisk,
    Priority,
    TokenDelta,
    TokenLogprob,
)
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import (
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
from holdfast.worker.wire import link_requests, link_responses
from holdfast.worker.wire.link_responses import LinkMessageError
from tests.worker.wire.link_ends import NO_LOAD, sent_down, sent_up

VOCAB_SIZE = 50_000
Words = TypeVar("Words")

# --- what can be said ---

uint32, uint64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
positive = st.integers(1, MAX_WHOLE)
token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=9).map(tuple)
float32, seconds = st.floats(width=32, allow_nan=False), st.integers(0, 10**9).map(lambda ms: ms / 1000)
text = st.text(max_size=9)


def of(kind: type[Words], **parts: st.SearchStrategy) -> st.SearchStrategy[Words]:
    return st.builds(kind, **parts)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """All that the token world hears of."""
    max_tokens = draw(st.none() | positive)
    return SamplingParams(
        temperature=draw(st.floats(0, 100)),
        top_k=draw(st.integers(0, MAX_WHOLE)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        seed=draw(st.integers(0, MAX_SEED)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 9)),
        stop_token_ids=draw(token_ids),
        ignore_eos=draw(st.booleans()),
        repetition_penalty=draw(st.floats(0.01, 100)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100), max_size=3)),
        allowed_token_ids=draw(st.none() | token_ids.filter(bool)),
        logprobs=draw(st.none() | st.integers(0, MAX_LOGPROBS)),
        prompt_logprobs=draw(st.none() | st.integers(0, MAX_LOGPROBS)),
    )


requests = of(
    EngineRequest,
    request_id=text,
    prompt_token_ids=token_ids.filter(bool),
    sampling_params=sampling_params(),
    priority=st.sampled_from(Priority),
    output_token_ids=token_ids,
    cache_salt=text,
    cache_ttl_s=st.integers(0, 86400),
    cache_prefix_tokens=st.integers(0, 2**31 - 1),
    cache_marks=st.lists(st.builds(KeptPrefix, uint32, uint32), max_size=4).map(tuple),
    bad_word_token_ids=st.lists(token_ids, max_size=3).map(tuple),
    grammar=text,
    group_id=text,
    tenant=text,
    time_left_s=st.none() | seconds,
    poison_risk=st.sampled_from(PoisonRisk),
    traceparent=text,
    pooling=st.none() | of(PoolingParams, dimensions=st.none() | positive, use_activation=st.none() | st.booleans()),
    second_start=uint32,
)
tops = st.lists(st.tuples(uint32, float32), max_size=3).map(tuple)
logprobs = of(TokenLogprob, token_id=uint32, logprob=float32, rank=uint32, top=tops)


@st.composite
def deltas(draw: st.DrawFn) -> TokenDelta:
    tokens = draw(token_ids)
    said = draw(st.lists(logprobs, min_size=len(tokens), max_size=len(tokens)) | st.just([]))
    return TokenDelta(
        attempt=AttemptKey("link-1", draw(uint64)),
        first_token_index=draw(uint32),
        token_ids=tokens,
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        num_cached_tokens=draw(uint32),
        logprobs=tuple(replace(item, token_id=token_id) for item, token_id in zip(said, tokens, strict=False)),
        prompt_logprobs=draw(st.lists(logprobs, max_size=3).map(tuple)),
        queued_s=draw(seconds),
    )


MAPPED = ("step_counts", "received_bytes_per_s", "received_tokens_from")
loads = of(EngineLoad, **{item.name: uint32 for item in fields(EngineLoad)})
stats = of(
    EngineStats,
    **{item.name: uint32 for item in fields(EngineStats) if item.name not in MAPPED}
    | {name: st.floats(0, allow_infinity=False) for name in ("step_time_s", "plan_time_s", "commit_time_s")},
    received_bytes_per_s=st.dictionaries(text, st.floats(0, allow_infinity=False), max_size=3),
    received_tokens_from=st.dictionaries(text, uint32, max_size=3),
    step_counts=st.lists(uint64, min_size=len(NO_STEPS), max_size=len(NO_STEPS)).map(tuple),
)
hashes = st.lists(uint64, max_size=5).map(tuple)
fetched = st.builds(FetchedAhead, st.builds(AttemptKey, st.just("link-1"), uint64), uint64)
updates = of(
    StepUpdate,
    step_id=uint64,
    load=loads,
    deltas=st.lists(deltas(), max_size=3).map(tuple),
    fetched_ahead=st.lists(fetched, max_size=3).map(tuple),
    cache=of(CacheChanges, stored=hashes, evicted=hashes),
    stats=st.none() | stats,
)
counts = dict.fromkeys(("max_model_len", "vocab_size", "tensor_parallel_size", "block_size", "num_blocks"), positive)
facts = of(
    ReplicaFacts,
    **dict.fromkeys(
        ("replica_id", "model", "path", "model_type", "dtype", "device", "executor", "checkpoint_digest"), text
    ),
    quantization=text,
    weight_bytes=uint64,
    **counts,
    eos_token_ids=st.frozensets(uint32, max_size=3),
    kv_bytes_per_token=uint64,
    row_invariant=st.booleans(),
    answers_digest=st.binary(max_size=9),
)
hellos = of(
    Hello, facts=facts, load=loads, heartbeat_s=seconds, frozen_after_s=st.integers(1, 10**9).map(lambda ms: ms / 1000)
)
heartbeats = of(Heartbeat, progress=uint64, expected_gap_s=st.floats(0, width=32, allow_infinity=False))


# --- it comes through ---


@given(attempt=uint64, request=requests)
def test_a_submission_comes_through(attempt, request):
    submit = sent_down(link_requests.submit_message(attempt, request)).submit
    group_id = request.group_id and GroupKey("link-1", request.group_id)
    received = link_requests.engine_request(submit, "link-1", VOCAB_SIZE)
    assert (submit.attempt, received) == (attempt, replace(request, group_id=group_id))


@given(attempt=uint64)
def test_an_abort_comes_through(attempt):
    assert sent_down(link_requests.abort_message(attempt)).abort.attempt == attempt


def test_a_router_can_ask_for_the_cache():
    assert sent_down(link_requests.follow_cache_message()).HasField("follow_cache")


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_an_order_to_log_more_or_less_comes_through(level):
    assert sent_down(link_requests.set_log_level_message(level)).set_log_level.level == level


def test_a_router_can_end_a_replica():
    assert sent_down(link_requests.kill_message()).WhichOneof("message") == "kill"


@given(update=updates)
def test_an_update_comes_through_with_the_numbers_of_attempts(update):
    (message,) = link_responses.step_messages(update)
    plain, others = PlainTokens.split([replace(delta, attempt=delta.attempt.number) for delta in update.deltas])
    ahead = tuple([one._replace(attempt=one.attempt.number) for one in update.fetched_ahead])
    read = replace(update, plain=PlainTokens(*map(tuple, plain)), deltas=tuple(others), fetched_ahead=ahead)
    assert sent_up(message) == read


@given(said=st.lists(deltas(), max_size=9))
def test_columns_and_deltas_are_what_was_said_and_an_attempts_own_keep_their_order(said):
    said = [replace(delta, attempt=delta.attempt.number % 3) for delta in said]
    plain, others = PlainTokens.split(said)
    again = [
        *(
            TokenDelta(attempt=a, first_token_index=index, token_ids=(token_id,))
            for a, index, token_id in zip(*plain, strict=False)
        ),
        *others,
    ]
    for attempt in range(3):
        assert [one for one in again if one.attempt == attempt] == [one for one in said if one.attempt == attempt]


@given(hello=hellos)
def test_a_hello_comes_through(hello):
    assert sent_up(link_responses.hello_message(hello)) == hello


@given(heartbeat=heartbeats)
def test_a_heartbeat_comes_through(heartbeat):
    assert sent_up(link_responses.heartbeat_message(heartbeat)) == heartbeat


@pytest.mark.parametrize(
    "error",
    [
        QueueFullError("the queue is full", 1.5),
        QueueFullError("it is full for an instant", 0.0001),
        ReplicaError("the engine has ended"),
        DeadlineExceededError("time was up"),
    ],
)
def test_a_rejection_says_whose_fault_it_is(error):
    received = rejected(error)
    assert (type(received), str(received)) == (type(error), str(error))
    if isinstance(error, QueueFullError):
        assert received.retry_after_s == pytest.approx(error.retry_after_s, abs=0.001)


def test_a_refused_field_comes_with_its_limit():
    received = rejected(InvalidRequestError("prompt", (), "is too long"))
    assert isinstance(received, InvalidRequestError)
    assert (received.field, received.limit, str(received)) == ("prompt", "is too long", "prompt: is too long")


def test_messages_have_a_field_for_each_of_the_words():
    """So that a figure which is new is not left behind without a word."""
    names = {item.name for item in fields(EngineStats)}
    assert set(engine_pb2.EngineStats.DESCRIPTOR.fields_by_name) == names
    assert set(engine_pb2.Load.DESCRIPTOR.fields_by_name) == {item.name for item in fields(EngineLoad)}
    assert {item.name for item in fields(ModelInfo)} < set(engine_pb2.Hello.DESCRIPTOR.fields_by_name)


# --- it cannot be read ---


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (None, "bytes that cannot be parsed"),
        (engine_pb2.LinkResponse(), "of an unknown kind"),
        (
            engine_pb2.LinkResponse(step={"deltas": [{"attempt": 7, "finish_reason": 9}]}),
            r"finish_reason = 9: must be one of 0, 1, 2, 3 \(attempt 7\)",
        ),
        (
            engine_pb2.LinkResponse(step={"deltas": [{"attempt": 7, "token_ids": [1, 2], "logprobs": [{}]}]}),
            r"1 logprobs for 2 tokens: there must be one for each \(attempt 7\)",
        ),
        (
            engine_pb2.LinkResponse(step={"deltas": [{"prompt_logprobs": [{"top_token_ids": [1]}]}]}),
            "0 top_logprobs for 1 top_token_ids",
        ),
        (
            engine_pb2.LinkResponse(step={"plain_attempts": [7, 8], "plain_token_indices": [1, 2]}),
            "2 attempts, 2 token_indices, 0 token_ids: there must be the same number of each",
        ),
        (
            engine_pb2.LinkResponse(step={"plain_token_ids": [1]}),
            "0 attempts, 0 token_indices, 1 token_ids: there must be the same number of each",
        ),
        (engine_pb2.LinkResponse(heartbeat={"expected_gap_s": math.nan}), "expected_gap_s = nan: must be"),
        (engine_pb2.LinkResponse(heartbeat={"expected_gap_s": -1.0}), "expected_gap_s = -1.0: must be"),
        (engine_pb2.LinkResponse(hello={}), "hello.max_model_len = 0: must be at least 1"),
        (engine_pb2.LinkResponse(hello=dict.fromkeys(counts, 1) | {"heartbeat_ms": 5}), "hello.frozen_after_ms = 0"),
    ],
)
def test_what_a_replica_says_wrongly_is_named(message, reason):
    with pytest.raises(LinkMessageError, match=reason):
        link_responses.read_response(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"priority": 7}, "priority = 7: must be one of 0, 1, 2, 3"),
        ({"suspicion": 3}, "suspicion = 3: must be one of 0, 1, 2"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [VOCAB_SIZE]}, f"prompt = {VOCAB_SIZE}: token ids must be below the vocabulary's size"),
        ({"output_token_ids": [1, 2**32 - 1]}, "output_token_ids = 4294967295: token ids must be below"),
        ({"sampling_params": {"top_p": 2.0}}, r"sampling_params.top_p = 2.0: must be in \(0, 1\]"),
        ({"sampling_params": {"top_p": 1.0, "seed": -1}}, "sampling_params.seed = -1"),
        ({"sampling_params": {"top_p": 1.0, "stop_token_ids": [VOCAB_SIZE]}}, "sampling_params.stop_token_ids = 50000"),
        (
            {"sampling_params": {"top_p": 1.0, "allowed_token_ids": [VOCAB_SIZE]}},
            "sampling_params.allowed_token_ids = 50000",
        ),
        ({"sampling_params": {"top_p": 1.0, "logit_bias": {VOCAB_SIZE: 1.0}}}, "sampling_params.logit_bias = 50000"),
        (
            {"sampling_params": {"top_p": 1.0, "bad_words": [{"ids": [1, VOCAB_SIZE]}]}},
            "sampling_params.bad_words = 50000",
        ),
    ],
)
def test_what_a_router_asks_wrongly_is_refused_by_field(change, message):
    submit = engine_pb2.Submit(**({"prompt_token_ids": [1], "sampling_params": {"top_p": 1.0}} | change))
    with pytest.raises(InvalidRequestError, match=message):
        link_requests.engine_request(submit, "link-1", VOCAB_SIZE)


@st.composite
def garbled(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A submission and an update, each with some of its bytes changed; or just bytes."""
    (up,) = link_responses.step_messages(draw(updates))
    messages = link_requests.submit_message(draw(uint64), draw(requests)), up
    return tuple(_garbled(draw, message.SerializeToString()) for message in messages)


def _garbled(draw: st.DrawFn, data: bytes) -> bytes:
    start = draw(st.integers(0, len(data)))
    return data[:start] + draw(st.binary(max_size=4)) + data[start + draw(st.integers(0, 4)) :]


@given(data=garbled() | st.tuples(st.binary(max_size=60), st.binary(max_size=60)))
def test_whatever_bytes_come_are_read_or_named(data):
    """Nothing else than these errors comes out of a codec, so that no link's task ends by them."""
    down, up = parsed(engine_pb2.LinkRequest, data[0]), parsed(engine_pb2.LinkResponse, data[1])
    with suppress(LinkMessageError):
        link_responses.read_response(up)
    with suppress(InvalidRequestError):
        link_requests.engine_request(engine_pb2.Submit() if down is None else down.submit, "link-1", VOCAB_SIZE)


def rejected(error: HoldfastError) -> HoldfastError:
    rejection = Rejection(attempt=AttemptKey("link-1", 5), error=error)
    (message,) = link_responses.step_messages(StepUpdate(load=NO_LOAD, rejections=(rejection,)))
    (received,) = sent_up(message).rejections
    assert received.attempt == 5
    return received.error


def parsed(kind: type, data: bytes):
    try:
        return kind.FromString(data)
    except DecodeError:
        return None
