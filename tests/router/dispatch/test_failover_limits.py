"""Where failover ends: requests that kill replicas, budgets, rests, and tokens that would not be the same."""

import pytest

from holdfast.router.config import RouterConfig
from holdfast.router.dispatch.circuit_breaker import NUM_FAILURES_TO_REST
from holdfast.router.dispatch.failures import HOST_LOSS_S, PROOF_S
from holdfast.worker.errors import (
    InvalidRequestError,
    ReplicaError,
    RequestQuarantinedError,
)
from holdfast.worker.request import NUM_STEPS_TO_CLEAR, FinishReason, PoisonRisk
from tests.router.core import Core, delivered, delta, facts, failure, load, rejected, sent, two_replicas


@pytest.fixture
def core() -> Core:
    return two_replicas()


# --- quarantine ---


def test_two_replicas_that_die_at_once_convict_nobody(core):
    """The second was lost before the request can have begun to run there."""
    core.submit("innocent")
    core.down("a")
    core.up("c")
    core.now += PROOF_S / 2
    trial = sent(core.down("b"))
    assert trial.request.poison_risk is PoisonRisk.ON_TRIAL
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


@pytest.mark.parametrize(
    ("host", "after_s", "is_convicted"),
    [
        ("host-1", 2 * PROOF_S, False),
        ("host-1", HOST_LOSS_S, True),
        ("host-2", 2 * PROOF_S, True),
    ],
)
def test_a_host_that_goes_with_two_replicas_convicts_nobody(host: str, after_s: float, is_convicted: bool):
    core = Core()
    core.dispatch.replica_up(facts("a", address="host-1:1"), load(), core.now)
    core.submit("innocent")
    core.down("a")
    core.dispatch.replica_up(facts("b", address=f"{host}:2"), load(), core.now)
    core.now += after_s
    actions = core.down("b")
    if is_convicted:
        assert isinstance(failure(actions).error, RequestQuarantinedError)
        return
    trial = sent(core.dispatch.replica_up(facts("c", address="host-2:1"), load(), core.now))
    assert trial.request.poison_risk is PoisonRisk.ON_TRIAL
    assert delivered(core.step(delta(trial.attempt, 0, 5), replica_id="c")).token_ids == (5,)


def test_a_poison_on_one_host_costs_one_replica_more():
    core = Core()
    for number in range(3):
        core.dispatch.replica_up(facts(f"r{number}", address=f"host:{number}"), load(), core.now)
    replica_id = sent(core.submit("poison")).replica_id
    for _ in range(2):
        core.now += 2 * PROOF_S
        replica_id = sent(core.down(replica_id)).replica_id
    core.now += 2 * PROOF_S
    assert "3 replicas were lost" in str(failure(core.down(replica_id)).error)


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
    assert not delivered(core.step(delta(attempt, 0, 1), replica_id="a")).replayed_without_guarantee
    core.down("a")
    attempt = sent(core.dispatch.replica_up(facts("b", **change), load(), core.now)).attempt
    output_delta = delivered(core.step(delta(attempt, 1, 2), replica_id="b"))
    assert output_delta.replayed_without_guarantee is not holds
    assert output_delta.system_fingerprint == facts("b", **change).fingerprint


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
    assert not delivered(core.step(delta(attempt, 0, 2), replica_id="b")).replayed_without_guarantee


def attempt_of(core: Core, request_id: str) -> int:
    return core.dispatch._requests[core.key(request_id)].attempt.number
