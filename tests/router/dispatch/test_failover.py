"""Failover in the dispatch core: a lost attempt is made up for by another, and the client sees nothing of it."""

import pytest

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.placement import MAX_REFUSALS
from holdfast.router.dispatch.quarantine import PROOF_S
from holdfast.router.events import Deliver, Usage
from holdfast.router.replicas.circuit_breaker import NUM_FAILURES_TO_REST
from holdfast.router.text.text_stream import TextStream
from holdfast.worker.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    ReplicaError,
    RequestQuarantinedError,
)
from holdfast.worker.request import EngineRequest, FinishReason, Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import Rejection
from holdfast.worker.suspicion import NUM_STEPS_TO_CLEAR, Suspicion
from tests.fakes import byte_tokenizer
from tests.router.core import Core, aborts, delivered, delta, facts, failure, load, sent


@pytest.fixture
def core() -> Core:
    """Two replicas; the first request goes to "a"."""
    core = Core()
    core.up("a")
    core.up("b", load=load(num_running=1))
    return core


def rejected(attempt: int, error: Exception) -> Rejection:
    return Rejection(attempt=attempt, error=error)


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
    actions = core.dispatch.submit(request, model="m", text=text, deadline=core.now + 60, now=core.now)
    tokens = OUTPUT.encode()
    said = core.step(delta(sent(actions).attempt, 0, *tokens[:num_seen]), replica_id="a")
    again = core.down("a")
    if again:
        submission = sent(again)
        assert submission.request.output_token_ids == tuple(tokens[:num_seen])
        for index in range(num_seen, len(tokens)):
            said += core.step(delta(submission.attempt, index, tokens[index]), replica_id="b")
    deliveries = [action for action in said if isinstance(action, Deliver)]
    assert "".join(delivery.text for delivery in deliveries) == OUTPUT[: OUTPUT.index("ENDE und")]
    assert deliveries[-1].finish_reason is FinishReason.STOP


def test_cached_tokens_are_told_once_even_if_the_first_replica_is_lost(core):
    sent(core.submit("x"))
    again = sent(core.down("a"))
    news = delta(again.attempt, 0, 1, finish=FinishReason.LENGTH)
    last = delivered(core.step(news, replica_id="b"))
    assert last.usage == Usage(num_prompt_tokens=3, num_completion_tokens=1)


@pytest.mark.parametrize("error", [ReplicaError("lost"), InternalError("the link failed by a fault of ours")])
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
    assert core.tick(after_s=29) == []
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


# --- quarantine ---


def test_two_replicas_that_die_at_once_convict_nobody(core):
    """The second was lost before the request can have begun to run there."""
    core.submit("innocent")
    core.down("a")
    core.up("c")
    core.now += PROOF_S / 2
    trial = sent(core.down("b"))
    assert trial.request.suspicion is Suspicion.ON_TRIAL
    assert delivered(core.step(delta(trial.attempt, 0, 5), replica_id="c")).token_ids == (5,)


def test_whoever_kills_its_replica_on_trial_is_convicted_however_soon(core):
    core.submit("poison")
    core.down("a")
    core.up("c")
    core.down("b")
    assert "3 replicas were lost" in str(failure(core.down("c")).error)


def test_a_request_that_kills_two_replicas_in_a_row_is_not_tried_again(core):
    core.submit("poison")
    core.down("a")
    core.up("c")
    core.now += 2 * PROOF_S
    error = failure(core.down("b")).error
    assert isinstance(error, RequestQuarantinedError)
    assert error.retry_after_s is None
    assert "2 replicas were lost" in str(error)
    assert core.dispatch.num_open == 0


def test_progress_between_two_deaths_clears_a_request(core):
    core.submit("x")
    attempt = sent(core.down("a")).attempt
    for index in range(NUM_STEPS_TO_CLEAR):
        core.step(delta(attempt, index, 1), replica_id="b")
    core.up("c")
    assert sent(core.down("b")).replica_id == "c"


def test_a_poison_that_emits_tokens_first_is_caught(core):
    """It strikes at the same token every time, and so at once when it goes on after the tokens so far."""
    attempt = sent(core.submit("poison")).attempt
    for index in range(50):
        core.step(delta(attempt, index, 1), replica_id="a")
    attempt = sent(core.down("a")).attempt
    core.step(delta(attempt, 50, 1), replica_id="b")
    assert isinstance(failure(core.down("b")).error, RequestQuarantinedError)


def test_retiring_replicas_do_not_count(core):
    core.down("b")
    core.submit("x")
    for name in ("c", "d", "e"):
        before = next(load.replica_id for load in core.dispatch.loads())
        core.dispatch.replica_retiring(before, True, core.now)
        core.down(before)
        assert sent(core.up(name)).request.request_id == "x"


def test_neighbours_of_a_poison_are_tried_one_by_one_and_live():
    core = Core()
    core.up("r0")
    for name in ("innocent", "poison", "bystander"):
        core.submit(name)
    core.down("r0")
    core.up("r1")
    core.down("r1")
    failed, finished = [], []
    actions = core.up("r2")
    for number in range(3, 9):
        for submission in [action for action in actions if hasattr(action, "request")]:
            name = submission.request.request_id
            if name == "poison":
                failed += [action.request_id for action in core.down(submission.replica_id) if hasattr(action, "error")]
                actions = core.up(f"r{number}")
            else:
                news = delta(submission.attempt, 0, 1, finish=FinishReason.STOP)
                actions = core.step(news, replica_id=submission.replica_id)
                finished.append(name)
    assert failed == ["poison"]
    assert finished == ["innocent", "bystander"]
    assert core.dispatch.num_open == 0


def test_suspects_do_not_hold_up_new_requests():
    core = Core()
    core.up("r0")
    for name in ("x", "y"):
        core.submit(name)
    for name in ("r1", "r2"):
        core.down(f"r{int(name[1]) - 1}")
        core.up(name)
    assert core.dispatch.num_queued == 1
    assert sent(core.submit("new")).request.request_id == "new"


# --- budget and breaker ---


def test_beyond_the_budget_lost_requests_are_paced():
    core = Core(RouterConfig(retry_burst=2, retries_per_s=4, retry_share=0))
    core.up("a")
    for index in range(4):
        core.submit(str(index))
    core.down("a")
    assert len(core.up("b")) == 2
    assert core.dispatch.next_tick == core.now + 0.25
    assert sent(core.tick(after_s=0.25)).request.request_id == "2"
    assert sent(core.tick(after_s=0.25)).request.request_id == "3"


def test_a_replica_that_fails_again_and_again_gets_a_rest(core):
    core.down("b")
    core.submit("x")
    for _ in range(NUM_FAILURES_TO_REST - 1):
        core.step(rejections=[rejected(attempt_of(core, "x"), ReplicaError("no"))], replica_id="a")
    assert core.step(rejections=[rejected(attempt_of(core, "x"), ReplicaError("no"))], replica_id="a") == []
    assert core.submit("y") == []
    assert core.dispatch.next_tick == core.now + 1.0
    actions = core.tick(after_s=1.0)
    assert sent(actions).request.request_id == "x", "one attempt tries it out"
    assert sent(core.step(delta(sent(actions).attempt, 0, 1), replica_id="a")).request.request_id == "y"


def test_a_callers_mistakes_do_not_open_the_breaker(core):
    core.down("b")
    for index in range(NUM_FAILURES_TO_REST + 1):
        attempt = sent(core.submit(str(index))).attempt
        core.step(rejections=[rejected(attempt, InvalidRequestError("prompt", (), "no"))], replica_id="a")


# --- draining ---


def test_a_retiring_replica_is_emptied_at_once(core):
    attempts = [sent(core.submit(name)).attempt for name in ("x", "y", "z")]
    core.step(delta(attempts[0], 0, 7), replica_id="a")
    on_a = sorted(core.dispatch._registry.get("a").attempts)
    actions = core.dispatch.replica_retiring("a", True, core.now)
    assert aborts(actions) == [("a", attempt) for attempt in on_a]
    assert core.dispatch._registry.get("a").attempts == set()
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


# --- identity ---


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"row_invariant": False}, False),
        ({"answers_digest": b"other"}, False),
    ],
)
def test_where_equal_tokens_are_not_certain_the_output_says_so(change, holds):
    core = Core()
    core.up("a")
    attempt = sent(core.submit("x")).attempt
    assert delivered(core.step(delta(attempt, 0, 1), replica_id="a")).identity_guaranteed
    core.down("a")
    attempt = sent(core.dispatch.replica_up(facts("b", **change), load(), core.now)).attempt
    delivery = delivered(core.step(delta(attempt, 1, 2), replica_id="b"))
    assert delivery.identity_guaranteed is holds
    assert delivery.fingerprint == facts("b", **change).fingerprint


@pytest.mark.parametrize(
    "change", [{"tensor_parallel_size": 4}, {"dtype": "f16"}, {"checkpoint_digest": "other"}, {"release": "2"}]
)
def test_where_tokens_would_be_others_the_output_does_not_go_on(change):
    core = Core()
    core.up("a")
    attempt = sent(core.submit("x")).attempt
    core.step(delta(attempt, 0, 1), replica_id="a")
    core.down("a")
    assert core.dispatch.replica_up(facts("b", **change), load(), core.now) == []
    assert sent(core.dispatch.replica_up(facts("c"), load(), core.now)).replica_id == "c"


def test_without_output_nothing_has_to_be_identical():
    core = Core()
    core.up("a")
    core.submit("x")
    core.down("a")
    attempt = sent(core.dispatch.replica_up(facts("b", row_invariant=False), load(), core.now)).attempt
    assert delivered(core.step(delta(attempt, 0, 2), replica_id="b")).identity_guaranteed


def attempt_of(core: Core, request_id: str) -> int:
    return core.dispatch._requests[request_id].attempt.number
