"""Who waits in the dispatch core, for how long, and in which order they leave."""

import pytest

from holdfast.router.events import SendSubmit
from holdfast.worker.errors import (
    DeadlineExceededError,
    QueueFullError,
)
from holdfast.worker.request import Priority
from holdfast.worker.step_update import Rejection
from tests.router.core import Core, aborts, delta, failure, load, queueing_core, sent

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
    core.dispatch.registry.get("r").note_report(load(num_running=1))
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
