"""The dispatch core, event by event: no mocks, no sleeps, time moved by hand."""

import pytest

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.events import SendSubmit, Usage
from holdfast.worker.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    ReplicaError,
    RequestAbortedError,
    RequestSupersededError,
    UnknownModelError,
)
from holdfast.worker.request import FinishReason, Priority
from holdfast.worker.step_update import Rejection
from tests.router.core import Core, aborts, delivered, delta, facts, failure, load, sent


@pytest.fixture
def core() -> Core:
    core = Core()
    core.up("r")
    return core


def queueing_core(max_queued: int = 2) -> Core:
    """One replica that takes one waiting request and has it: whatever comes next waits in the router."""
    core = Core(RouterConfig(max_waiting_per_replica=1), LimitsConfig(max_queued=max_queued))
    core.up("r")
    core.submit("running")
    return core


# --- output ---


def test_output_flows_from_submission_to_the_last_word(core):
    attempt = sent(core.submit("x")).attempt
    first = delivered(core.step(delta(attempt, 0, 0, 1)))
    assert (first.first_token_index, first.token_ids, first.text, first.finish_reason) == (0, (0, 1), "a", None)
    last = delivered(core.step(delta(attempt, 2, 2, finish=FinishReason.LENGTH)))
    assert (last.first_token_index, last.token_ids, last.text, last.finish_reason) == (2, (2,), "bc", "length")
    assert last.usage == Usage(num_prompt_tokens=3, num_completion_tokens=3)
    assert core.dispatch.num_open == 0
    assert core.dispatch.next_tick is None


def test_one_step_carries_many_requests(core):
    attempts = [sent(core.submit(name)).attempt for name in ("x", "y")]
    actions = core.step(*(delta(attempt, 0, 5) for attempt in attempts))
    assert [action.request_id for action in actions] == ["x", "y"]


def test_a_finish_without_tokens_is_a_last_word(core):
    attempt = sent(core.submit("x")).attempt
    core.step(delta(attempt, 0, 0, 1))
    last = delivered(core.step(delta(attempt, 2, finish=FinishReason.LENGTH)))
    assert (last.token_ids, last.text) == ((), "b")


def test_tokens_that_were_seen_are_dropped(core):
    attempt = sent(core.submit("x")).attempt
    core.step(delta(attempt, 0, 0, 1))
    assert core.step(delta(attempt, 0, 0, 1)) == []
    assert core.step(delta(attempt, 1)) == []
    assert delivered(core.step(delta(attempt, 1, 1, 2, 3))).token_ids == (2, 3)


def test_a_gap_is_our_bug_and_ends_this_request_alone(core):
    x, y = (sent(core.submit(name)).attempt for name in ("x", "y"))
    actions = core.step(delta(x, 1, 9), delta(y, 0, 5))
    assert isinstance(failure(actions).error, InternalError)
    assert "1 output tokens are missing" in str(failure(actions).error)
    assert aborts(actions) == [("r", x)]
    assert delivered(actions).request_id == "y"


def test_a_text_state_that_breaks_ends_its_request_alone(core, caplog):
    x, y = (sent(core.submit(name)).attempt for name in ("x", "y"))
    actions = core.step(delta(x, 0, "not a token"), delta(y, 0, 5))
    assert isinstance(failure(actions).error, InternalError)
    assert aborts(actions) == [("r", x)]
    assert delivered(actions).request_id == "y"
    assert "request x" in caplog.text


def test_a_stop_string_ends_the_output_and_frees_the_replica(core):
    attempt = sent(core.submit("x", stop_at=4)).attempt
    actions = core.step(delta(attempt, 0, 3, 4, 5))
    last = delivered(actions)
    assert (last.token_ids, last.text, last.finish_reason) == ((3, 4), "de", "stop")
    assert last.usage == Usage(num_prompt_tokens=3, num_completion_tokens=2)
    assert aborts(actions) == [("r", attempt)]
    assert core.step(delta(attempt, 3, 6)) == []


def test_a_stop_string_in_the_last_delta_needs_no_abort(core):
    attempt = sent(core.submit("x", stop_at=4)).attempt
    actions = core.step(delta(attempt, 0, 3, 4, 5, finish=FinishReason.LENGTH))
    assert delivered(actions).finish_reason == "stop"
    assert aborts(actions) == []


# --- attempts as fences ---


def test_every_submission_is_a_new_attempt(core):
    attempts = [sent(core.submit(name)).attempt for name in ("x", "y")]
    core.cancel("x")
    attempts.append(sent(core.submit("x")).attempt)
    assert len(set(attempts)) == 3


def test_a_late_answer_to_an_old_attempt_is_dropped(core):
    old = sent(core.submit("x")).attempt
    core.cancel("x")
    new = sent(core.submit("x")).attempt
    assert core.step(delta(old, 0, 9, finish=FinishReason.ABORT)) == []
    assert delivered(core.step(delta(new, 0, 1))).token_ids == (1,)


def test_another_replica_cannot_speak_for_an_attempt(core):
    attempt = sent(core.submit("x")).attempt
    core.up("other")
    assert core.step(delta(attempt, 0, 9), replica_id="other") == []


def test_news_of_a_replica_that_is_not_up_is_dropped(core):
    attempt = sent(core.submit("x")).attempt
    core.down()
    assert core.step(delta(attempt, 0, 9)) == []


def test_an_attempt_goes_on_after_the_tokens_so_far(core):
    """What a second attempt would be asked: the state alone is enough to carry on."""
    attempt = sent(core.submit("x")).attempt
    core.step(delta(attempt, 0, 4, 5))
    state = core.dispatch._requests["x"]
    assert state.continuation().output_token_ids == (4, 5)


# --- cancel ---


def test_a_cancel_reaches_the_replica_at_once(core):
    attempt = sent(core.submit("x")).attempt
    assert aborts(core.cancel("x")) == [("r", attempt)]
    assert core.dispatch.num_open == 0


def test_a_cancelled_request_leaves_the_queue_without_a_trace():
    core = queueing_core()
    core.submit("x")
    assert core.cancel("x") == []
    assert core.dispatch.num_queued == 0


def test_cancelling_what_is_over_does_nothing(core):
    attempt = sent(core.submit("x")).attempt
    core.step(delta(attempt, 0, 1, finish=FinishReason.STOP))
    assert core.cancel("x") == []
    assert core.cancel("never heard of") == []


# --- abort ---


def test_an_abort_ends_a_request_after_what_it_has_and_reaches_the_replica_at_once(core):
    attempt = sent(core.submit("x")).attempt
    core.step(delta(attempt, 0, 4, 5))
    actions = core.abort("x")
    last = delivered(actions)
    assert (last.finish_reason, last.first_token_index, last.token_ids) == (FinishReason.ABORT, 2, ())
    assert last.usage.num_completion_tokens == 2
    assert aborts(actions) == [("r", attempt)]
    assert core.dispatch.num_open == 0
    assert core.step(delta(attempt, 2, 6)) == [], "what is still on its way does nothing"


def test_an_aborted_request_leaves_the_queue_and_says_so():
    core = queueing_core()
    core.submit("x")
    actions = core.abort("x")
    assert (delivered(actions).finish_reason, aborts(actions)) == (FinishReason.ABORT, [])
    assert core.dispatch.num_queued == 0


def test_an_abort_makes_room_for_who_waits():
    core = queueing_core()
    core.submit("x")
    assert sent(core.abort("running")).request.request_id == "x"


def test_aborting_what_is_over_does_nothing(core):
    core.submit("x")
    core.cancel("x")
    assert core.abort("x") == []
    assert core.abort("never heard of") == []


# --- deadlines ---


def test_a_deadline_ends_a_running_request(core):
    attempt = sent(core.submit("x", timeout_s=5)).attempt
    core.step(delta(attempt, 0, 1))
    assert core.dispatch.next_tick == 105.0
    assert core.tick(after_s=4.9) == []
    actions = core.tick(after_s=0.1)
    assert isinstance(failure(actions).error, DeadlineExceededError)
    assert "after 1 output tokens" in str(failure(actions).error)
    assert aborts(actions) == [("r", attempt)]


def test_a_replica_is_told_what_is_left_of_the_time_when_the_request_is_sent():
    core = queueing_core()
    core.submit("x", timeout_s=5)
    core.now += 2
    assert sent(core.step()).request.time_left_s == 3.0


def test_a_replica_that_finds_the_time_too_short_ends_the_request(core):
    attempt = sent(core.submit("x")).attempt
    refusal = Rejection(attempt=attempt, error=DeadlineExceededError("too late"))
    assert failure(core.step(rejections=[refusal])).error is refusal.error


def test_a_deadline_ends_a_queued_request():
    core = queueing_core()
    core.submit("x", timeout_s=5)
    actions = core.tick(after_s=5)
    assert failure(actions).request_id == "x"
    assert "waited for a replica" in str(failure(actions).error)
    assert core.dispatch.num_queued == 0


def test_requests_that_ran_out_of_time_together_are_not_sent_first():
    core = queueing_core()
    core.submit("x", timeout_s=60)
    core.submit("y", timeout_s=60)
    actions = core.tick(after_s=60)
    assert not [action for action in actions if isinstance(action, SendSubmit)]
    assert core.dispatch.num_open == 0


def test_the_earliest_deadline_is_next(core):
    for name, timeout_s in (("x", 9), ("y", 5), ("z", 7)):
        core.submit(name, timeout_s=timeout_s)
    assert core.dispatch.next_tick == 105.0
    core.cancel("y")
    assert core.dispatch.next_tick == 107.0


def test_a_deadline_that_has_passed_is_refused(core):
    with pytest.raises(DeadlineExceededError):
        core.submit("x", timeout_s=0)
    assert core.dispatch.num_open == 0


# --- the queue ---


def test_a_replica_with_a_full_queue_gets_nothing_more():
    core = queueing_core()
    assert core.submit("x") == []
    assert core.dispatch.num_queued == 1
    assert sent(core.step(load=load(num_running=1))).request.request_id == "x"


def test_what_waits_leaves_by_priority():
    core = queueing_core(max_queued=3)
    core.submit("normal")
    core.submit("critical", priority=Priority.CRITICAL)
    assert sent(core.step(load=load(num_running=1))).request.request_id == "critical"


def test_nobody_jumps_the_queue():
    core = queueing_core(max_queued=3)
    core.submit("x")
    core.dispatch._registry.get("r").note_report(load(num_running=1))
    assert sent(core.submit("y")).request.request_id == "x"


def test_a_full_queue_refuses_with_an_estimate():
    core = queueing_core(max_queued=1)
    core.submit("x")
    with pytest.raises(QueueFullError) as refused:
        core.submit("y")
    assert refused.value.retry_after_s is not None
    assert core.dispatch.num_open == 2


def test_a_full_queue_has_room_for_what_was_admitted_before():
    """A request with output has lost its router, not its turn; there is a bound for those as well."""
    core = queueing_core(max_queued=1)
    core.submit("new")
    core.submit("resumed", output=(1, 2))
    with pytest.raises(QueueFullError):
        core.submit("resumed too", output=(1,))
    assert sent(core.step(load=load(num_running=1))).request.request_id == "resumed"
    core.submit("resumed too", output=(1,))


def test_old_figures_do_not_lock_a_router_out():
    """The replica was full when last heard of, and has no reason to speak to a router that has nothing there."""
    core = Core()
    core.up("r", load=load(num_running=64, num_waiting=1000))
    assert sent(core.submit("x")).replica_id == "r"


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
    assert core.dispatch.next_tick == 130.0
    assert core.tick(after_s=29.9) == []
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
    return core.dispatch._requests[request_id].tenant.counter


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
    a, b = (core.dispatch._registry.get(name) for name in "ab")
    assert (a._num_sent_tokens, b._num_sent_tokens) == (500, 1000)
