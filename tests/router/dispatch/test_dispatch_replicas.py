"""Which replica a request gets, replicas that come and go, and siblings that stay together."""

import pytest

from holdfast.router.config import RouterConfig
from holdfast.worker.errors import (
    InvalidRequestError,
    ReplicaError,
    RequestAbortedError,
    RequestSupersededError,
    UnknownModelError,
)
from holdfast.worker.request import FinishReason
from holdfast.worker.step_update import Rejection
from tests.router.core import Core, aborts, delivered, delta, facts, failure, load, queueing_core, sent

# --- the choice ---


def test_the_emptier_replica_is_preferred():
    core = Core()
    core.up("busy", load=load(num_running=5))
    core.up("idle")
    assert sent(core.submit("x")).replica_id == "idle"


def test_what_was_sent_since_the_report_counts():
    core = Core()
    core.up("a")
    core.up("b")
    chosen = [sent(core.submit(str(index))).replica_id for index in range(6)]
    assert sorted(chosen) == ["a"] * 3 + ["b"] * 3


def test_a_report_changes_the_choice():
    core = Core()
    core.up("a", load=load(num_running=5))
    core.up("b", load=load(num_running=4))
    core.step(replica_id="b", load=load(num_running=6))
    assert sent(core.submit("x")).replica_id == "a"


def test_a_replica_with_room_is_found_even_if_it_is_not_drawn():
    core = Core(RouterConfig(max_waiting_per_replica=1))
    for name in ("a", "b", "c"):
        core.up(name)
    for index in range(3):
        core.submit(str(index))
    core.step(replica_id="c", load=load(num_running=1))
    assert sent(core.submit("x")).replica_id == "c"


def test_models_are_kept_apart():
    core = Core()
    core.up("a", model="one")
    core.up("b", model="two")
    assert sent(core.submit("x", model="two")).replica_id == "b"


def test_a_retiring_replica_without_another_gets_nothing_new_and_finishes_what_it_has(core):
    attempt = sent(core.submit("x")).attempt
    core.dispatch.replica_retiring("r", True, core.now)
    assert core.submit("y") == []
    assert delivered(core.step(delta(attempt, 0, 1, finish=FinishReason.STOP))).request_id == "x"
    assert sent(core.dispatch.replica_retiring("r", False, core.now)).request.request_id == "y"


# --- replicas come and go ---


def test_a_rejection_is_the_last_word(core):
    attempt = sent(core.submit("x")).attempt
    refusal = Rejection(attempt=attempt, error=InvalidRequestError("prompt", (), "too long"))
    actions = core.step(rejections=[refusal])
    assert failure(actions).error is refusal.error
    assert aborts(actions) == []
    assert core.step(rejections=[refusal]) == []


def test_a_model_never_seen_is_unknown(core):
    with pytest.raises(UnknownModelError, match="served: m"):
        core.submit("x", model="other")


def test_requests_wait_for_a_replica_to_come_back(core):
    core.down("r")
    assert core.submit("x") == []
    assert sent(core.up("r")).request.request_id == "x"


def test_requests_do_not_wait_for_a_replica_for_ever(core):
    core.down("r")
    core.submit("x", timeout_s=1000)
    assert core.dispatch.next_tick == 220.0
    assert core.tick(after_s=119.9) == []
    assert isinstance(failure(core.tick(after_s=0.1)).error, ReplicaError)
    with pytest.raises(ReplicaError, match="no replica of model 'm' is up"):
        core.submit("y")
    assert core.dispatch.next_tick is None


def test_everything_can_be_ended_at_once():
    core = queueing_core()
    core.submit("waiting")
    actions = core.dispatch.close_all(RequestAbortedError("stopping"))
    assert {action.request_id for action in actions if hasattr(action, "error")} == {"running", "waiting"}
    assert len(aborts(actions)) == 1
    core.dispatch.check_integrity()
    assert core.dispatch.num_open == 0


def test_what_is_handed_over_is_what_its_client_comes_again_with():
    core = queueing_core()
    core.submit("comes again", client_attempt=1)
    core.submit("does not")
    actions = core.dispatch.hand_over(RequestAbortedError("stopping"))
    assert failure(actions).request_id == "comes again"
    core.dispatch.check_integrity()
    assert core.dispatch.num_open == 2


def test_a_submission_that_comes_late_does_not_win(core):
    newer = sent(core.submit("x", client_attempt=3)).attempt
    with pytest.raises(RequestSupersededError, match="submission 2 of request x came after submission 3"):
        core.supersede("x", client_attempt=2)
    assert delivered(core.step(delta(newer, 0, 1))).token_ids == (1,)
    assert failure(core.supersede("x", client_attempt=4)).request_id == "x"


def test_of_two_submissions_of_one_id_the_newer_wins(core):
    older = sent(core.submit("x")).attempt
    actions = core.supersede("x")
    assert isinstance(failure(actions).error, RequestSupersededError)
    assert aborts(actions) == [("r", older)]
    newer = sent(core.submit("x")).attempt
    assert core.step(delta(older, 0, 9)) == []
    assert delivered(core.step(delta(newer, 0, 1))).token_ids == (1,)
    assert core.supersede("never heard of") == []


# --- what is known of models ---


def test_a_model_can_do_what_all_its_replicas_can():
    core = Core()
    core.dispatch.replica_up(facts("a", num_blocks=9, row_invariant=True), load(), core.now)
    core.dispatch.replica_up(facts("b", num_blocks=5, row_invariant=False), load(), core.now)
    (model,) = core.dispatch.models()
    assert (model.num_replicas, model.facts.num_blocks, model.facts.row_invariant) == (2, 5, False)
    core.down("b")
    (model,) = core.dispatch.models()
    assert (model.num_replicas, model.facts.num_blocks, model.facts.row_invariant) == (1, 9, True)


def test_a_model_without_replicas_is_still_known(core):
    core.down("r")
    (model,) = core.dispatch.models()
    assert (model.name, model.num_replicas) == ("m", 0)


# --- siblings ---


def siblings_sent_to(core: Core, *numbers: int) -> list[str]:
    """Where the siblings of one request go, in the order of `numbers`."""
    return [sent(core.submit(f"g/{number}", group_id="g")).replica_id for number in numbers]


def test_siblings_go_where_the_first_one_runs_though_others_are_emptier():
    core = Core()
    core.up("a")
    core.up("b")
    assert siblings_sent_to(core, 0, 1, 2) == ["a", "a", "a"]
    assert sent(core.submit("alone")).replica_id == "b"


def test_siblings_go_elsewhere_when_the_first_ones_replica_is_full_or_retiring_or_the_first_is_over():
    full = Core(config=RouterConfig(max_waiting_per_replica=2))
    full.up("a")
    full.up("b")
    assert siblings_sent_to(full, 0, 1, 2) == ["a", "a", "b"]
    retiring = Core()
    retiring.up("a")
    retiring.up("b")
    assert siblings_sent_to(retiring, 0) == ["a"]
    retiring.dispatch.replica_retiring("a", True, retiring.now)
    assert siblings_sent_to(retiring, 1) == ["b"]
    over = Core()
    over.up("a")
    over.up("b")
    assert siblings_sent_to(over, 0) == ["a"]
    over.submit("other")
    over.cancel("g/0")
    assert siblings_sent_to(over, 1) == ["a"]


def charged(core: Core, request_id: str) -> float:
    """All that the tenant of an open request has been charged, in prompt tokens."""
    return core.dispatch._requests[core.key(request_id)].tenant.counter


def test_a_prompt_that_siblings_share_is_charged_once(core):
    """A replica computes it once, and the siblings fork from there."""
    for number in range(4):
        core.submit(f"g/{number}", group_id="g", tenant="t", num_prompt_tokens=100)
    assert charged(core, "g/0") == 100


def test_a_prompt_is_charged_once_for_each_replica_that_computes_it():
    core = Core(config=RouterConfig(max_waiting_per_replica=2))
    core.up("a")
    core.up("b")
    where = []
    for number in range(4):
        actions = core.submit(f"g/{number}", group_id="g", tenant="t", num_prompt_tokens=100)
        where.append(sent(actions).replica_id)
    assert where == ["a", "a", "b", "b"]
    assert charged(core, "g/0") == 200


def test_a_sibling_without_another_on_its_replica_is_charged_for_the_prompt(core):
    core.submit("g/0", group_id="g", tenant="t", num_prompt_tokens=100)
    core.cancel("g/0")
    core.submit("g/1", group_id="g", tenant="t", num_prompt_tokens=100)
    assert charged(core, "g/1") == 200


def test_siblings_count_as_load_with_one_prompt():
    """Four siblings are less work than two requests of their own with the same prompt."""
    core = Core()
    core.up("a")
    core.up("b")
    for number in range(4):
        core.submit(f"g/{number}", group_id="g", num_prompt_tokens=500)
    for name in ("x", "y"):
        core.submit(name, num_prompt_tokens=500)
    a, b = (core.dispatch.registry.get(name) for name in "ab")
    assert (a._num_sent_tokens, b._num_sent_tokens) == (500, 1000)
