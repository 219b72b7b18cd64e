"""Failover in the dispatch core: a lost attempt is made up for by another, and the client sees nothing of it."""

from dataclasses import replace

import pytest

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.placement import MAX_REFUSALS
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.generation import OutputDelta, Usage
from holdfast.router.text.text_stream import TextStream
from holdfast.worker.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    ReplicaError,
)
from holdfast.worker.pooling import PoolingParams
from holdfast.worker.request import EngineRequest, FinishReason, Priority, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.wire.link_requests import engine_request, submit_message
from tests.fakes import byte_tokenizer
from tests.router.core import Core, aborts, delivered, delta, failure, load, rejected, sent, two_replicas


@pytest.fixture
def core() -> Core:
    return two_replicas()


# --- the same request goes on elsewhere ---


def test_a_lost_request_goes_on_elsewhere_after_its_last_token(core):
    first = sent(core.submit("x"))
    core.step(delta(first.attempt, 0, 0, 1), replica_id="a")
    again = sent(core.down("a"))
    assert (again.replica_id, again.request.output_token_ids) == ("b", (0, 1))
    assert again.request.prompt_token_ids == first.request.prompt_token_ids
    last = delivered(core.step(delta(again.attempt, 2, 2, finish=FinishReason.LENGTH), replica_id="b"))
    assert (last.first_token_index, last.token_ids, last.text) == (2, (2,), "bc")
    assert last.usage == Usage(num_prompt_tokens=3, num_completion_tokens=3)


def test_a_lost_pooling_request_is_run_again_elsewhere(core):
    """Its wish crosses the wire to the other replica, and its result comes back once."""
    wish = PoolingParams(dimensions=2, use_activation=False)
    request = EngineRequest(
        request_id="x", prompt_token_ids=(1, 2), sampling_params=SamplingParams(seed=0), pooling=wish
    )
    text = TextStream(byte_tokenizer(), request.sampling_params)
    first = sent(core.dispatch.submit(RequestState(request=request, model="m", text=text, deadline=core.now + 60), 0.0))
    again = sent(core.down("a"))
    assert again.replica_id == "b"
    message = submit_message(again.attempt, again.request).submit
    assert engine_request(message, "link", 10).pooling == wish
    end = TokenDelta(again.attempt, 0, (), FinishReason.STOP, pooled=b"12345678", num_cached_tokens=1)
    late = replace(end, attempt=first.attempt)
    assert core.step(late, replica_id="b") == []
    last = delivered(core.step(end, replica_id="b"))
    assert (last.pooled, last.finish_reason, last.num_cached_tokens) == (b"12345678", FinishReason.STOP, 1)
    assert last.usage == Usage(num_prompt_tokens=2, num_completion_tokens=0, num_cached_tokens=1)


def test_a_late_answer_of_the_lost_attempt_is_fenced_off(core):
    first = sent(core.submit("x"))
    again = sent(core.down("a"))
    assert core.step(delta(first.attempt, 0, 9), replica_id="b") == []
    assert delivered(core.step(delta(again.attempt, 0, 1), replica_id="b")).token_ids == (1,)


def test_a_stop_string_half_seen_is_still_held_back(core):
    first = sent(core.submit("x", stop_at=4))
    core.step(delta(first.attempt, 0, 2, 3), replica_id="a")
    again = sent(core.down("a"))
    last = delivered(core.step(delta(again.attempt, 2, 4, 5), replica_id="b"))
    assert (last.token_ids, last.text, last.finish_reason) == ((4,), "de", "stop")


OUTPUT = "Grüße aus Köln, ENDEN wollend. ENDE und mehr"


@pytest.mark.parametrize("num_seen", range(len(OUTPUT.encode())))
def test_wherever_it_is_lost_the_text_is_the_same(core, num_seen):
    """Half a character or half a stop string may be held back at that time."""
    params = SamplingParams(seed=0, max_tokens=100, stop=["ENDE ", "Köln!"])
    request = EngineRequest(request_id="x", prompt_token_ids=(1,), sampling_params=params)
    text = TextStream(byte_tokenizer(), params)
    state = RequestState(request=request, model="m", text=text, deadline=core.now + 60)
    actions = core.dispatch.submit(state, core.now)
    tokens = OUTPUT.encode()
    said = core.step(delta(sent(actions).attempt, 0, *tokens[:num_seen]), replica_id="a")
    again = core.down("a")
    if again:
        submission = sent(again)
        assert submission.request.output_token_ids == tuple(tokens[:num_seen])
        for index in range(num_seen, len(tokens)):
            said += core.step(delta(submission.attempt, index, tokens[index]), replica_id="b")
    deltas = [action for action in said if isinstance(action, OutputDelta)]
    assert "".join(output_delta.text for output_delta in deltas) == OUTPUT[: OUTPUT.index("ENDE und")]
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_cached_tokens_are_told_once_even_if_the_first_replica_is_lost(core):
    sent(core.submit("x"))
    again = sent(core.down("a"))
    news = delta(again.attempt, 0, 1, finish=FinishReason.LENGTH)
    last = delivered(core.step(news, replica_id="b"))
    assert last.usage == Usage(num_prompt_tokens=3, num_completion_tokens=1)


@pytest.mark.parametrize("error", [ReplicaError("lost"), InternalError("the link failed: internal error")])
def test_why_a_link_broke_does_not_matter(core, error):
    core.submit("x")
    assert sent(core.down("a", error)).replica_id == "b"


# --- waiting ---


def test_with_no_replica_left_the_request_waits_for_one(core):
    core.down("b")
    attempt = sent(core.submit("x")).attempt
    core.step(delta(attempt, 0, 5), replica_id="a")
    assert core.down("a") == []
    assert sent(core.up("c")).request.output_token_ids == (5,)


def test_waiting_for_a_replica_is_bounded(core):
    core.down("b")
    core.submit("x", timeout_s=1000)
    core.down("a")
    assert core.tick(after_s=119) == []
    assert isinstance(failure(core.tick(after_s=1)).error, ReplicaError)


def test_the_deadline_holds_through_failovers(core):
    core.down("b")
    core.submit("x", timeout_s=5)
    core.down("a")
    core.now += 3
    attempt = sent(core.up("c")).attempt
    actions = core.tick(after_s=2)
    assert isinstance(failure(actions).error, DeadlineExceededError)
    assert aborts(actions) == [("c", attempt)]


def test_lost_requests_wait_in_front_of_their_class_in_the_order_they_had():
    core = Core(limits=LimitsConfig(max_queued=4))
    core.up("a")
    for name in ("x", "y"):
        core.submit(name)
    core.down("a")
    core.submit("new")
    core.submit("critical", priority=Priority.CRITICAL)
    order = [action.request.request_id for action in core.up("b")]
    assert order == ["critical", "x", "y", "new"]


def test_a_full_queue_still_takes_back_what_was_admitted():
    core = Core(limits=LimitsConfig(max_queued=0))
    core.up("a")
    core.submit("x")
    assert core.down("a") == []
    assert core.dispatch.num_queued == 1
    assert sent(core.up("b")).request.request_id == "x"


# --- what a replica refuses ---


def test_a_replica_that_gives_a_request_up_is_replaced(core):
    attempt = sent(core.submit("x")).attempt
    actions = core.step(delta(attempt, 0, finish=FinishReason.ABORT), replica_id="a", load=load(num_running=9))
    assert sent(actions).replica_id == "b"


def test_a_full_replica_is_left_alone_for_a_while(core):
    attempt = sent(core.submit("x")).attempt
    refusal = rejected(attempt, QueueFullError("full", 0.5))
    attempt = sent(core.step(rejections=[refusal], replica_id="a")).attempt
    assert core.step(rejections=[rejected(attempt, QueueFullError("full", 9.0))], replica_id="b") == []
    assert core.dispatch.next_tick == core.now + 0.5
    assert sent(core.tick(after_s=0.5)).replica_id == "a"


def test_a_mistake_of_the_caller_is_not_tried_elsewhere(core):
    attempt = sent(core.submit("x")).attempt
    refusal = rejected(attempt, InvalidRequestError("prompt", (), "too long"))
    assert failure(core.step(rejections=[refusal], replica_id="a")).error is refusal.error
    assert core.dispatch.num_open == 0


def test_a_request_that_every_replica_gives_up_fails_in_the_end(core):
    actions = core.submit("x")
    for _ in range(MAX_REFUSALS):
        submission = sent(actions)
        actions = core.step(
            rejections=[rejected(submission.attempt, ReplicaError("no"))], replica_id=submission.replica_id
        )
    submission = sent(actions)
    actions = core.step(rejections=[rejected(submission.attempt, ReplicaError("no"))], replica_id=submission.replica_id)
    assert str(failure(actions).error) == "no"


# --- draining ---


def test_a_retiring_replica_is_emptied_at_once(core):
    attempts = [sent(core.submit(name)).attempt for name in ("x", "y", "z")]
    core.step(delta(attempts[0], 0, 7), replica_id="a")
    on_a = sorted(core.dispatch.registry.get("a").attempts)
    actions = core.dispatch.replica_retiring("a", True, core.now)
    assert aborts(actions) == [("a", attempt) for attempt in on_a]
    assert core.dispatch.registry.get("a").attempts == set()
    moved = [action.request for action in actions if hasattr(action, "request")]
    assert {request.request_id: request.output_token_ids for request in moved}["x"] == (7,)


def test_what_finds_no_room_moves_when_there_is_some():
    core = Core(RouterConfig(max_waiting_per_replica=1))
    core.up("a")
    core.submit("x")
    core.up("b")
    core.submit("y")
    assert core.dispatch.replica_retiring("a", True, core.now) == []
    actions = core.step(replica_id="b", load=load(num_running=1))
    assert sent(actions).request.request_id == "x"
    assert len(aborts(actions)) == 1
