"""A longest time to the first token: who would miss it is refused in time, and nobody else pays for it."""

import pytest

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.admission import LATEST_START, TTFT_SHARE
from holdfast.worker.config import ServiceOrderConfig
from holdfast.worker.errors import QueueFullError
from holdfast.worker.request import FinishReason, Priority
from tests.router.core import Core, delta, failure, load, sent
from tests.router.dispatch.test_admission import AdmissionQueue, a_request, popped, push

MAX_S = 10.0


def a_core(max_waiting: int = 1) -> Core:
    """One replica that takes one waiting request and has it: whatever comes next waits in the router."""
    core = Core(RouterConfig(max_waiting_per_replica=max_waiting, max_ttft_s=MAX_S), LimitsConfig())
    core.up("r")
    return core


def a_paced_queue(pause_s: float, **shares: float) -> AdmissionQueue:
    """A queue that somebody left every `pause_s` seconds while others waited, and that is empty."""
    queue = AdmissionQueue(1000, ServiceOrderConfig(tenant_shares=shares), MAX_S)
    for index in range(4):
        queue.put_back(a_request(f"first {index}"), 0.0)
    for index in range(4):
        popped(queue, now=pause_s * index)
    return queue


def test_what_still_waits_when_it_would_come_too_late_is_refused_then():
    core = a_core()
    core.submit("running")
    core.submit("waiting")
    assert core.dispatch.next_tick == core.now + LATEST_START * MAX_S
    assert core.tick(LATEST_START * MAX_S - 0.001) == []
    refused = failure(core.tick(0.002))
    assert refused.request_id == "waiting"
    assert isinstance(refused.error, QueueFullError)
    assert "max_ttft_s" in str(refused.error)
    assert core.dispatch.num_open == 1, "what a replica has goes on"


def test_without_a_replica_requests_wait_for_one_as_ever():
    core = a_core()
    core.down("r")
    core.submit("x")
    assert core.tick(MAX_S) == []
    assert sent(core.up("r")).request.request_id == "x"


def test_an_answer_that_has_begun_is_not_cut_short_for_a_sibling_that_waits():
    core = a_core()
    core.submit("g/0", group_id="g")
    core.submit("g/1", group_id="g")
    assert core.dispatch.num_queued == 1
    assert core.tick(MAX_S) == []
    assert core.dispatch.num_open == 2


def test_a_request_alone_is_not_refused_because_its_own_siblings_wait():
    """However slow the pace was before, and however many completions it asks for."""
    core = a_core()
    core.submit("running")
    for index in range(4):
        core.submit(f"paced {index}")
    for index in range(4):  # each takes 4 s of the 5 s that may pass until the next is refused
        core.now += 4.0
        core.cancel("running" if index == 0 else f"paced {index - 1}")
    core.cancel("paced 3")
    assert (core.dispatch.num_open, core.dispatch.num_queued) == (0, 0)
    for number in range(5):
        core.submit(f"g/{number}", group_id="g")
    assert core.dispatch.num_queued == 4


def test_what_has_output_or_comes_back_is_not_refused():
    core = a_core()
    attempt = sent(core.submit("running")).attempt
    core.submit("resumed", output=(1, 2))
    core.step(delta(attempt, 0, 1))
    core.down("r")
    assert core.tick(MAX_S) == []
    assert core.dispatch.num_queued == 2


def test_who_would_wait_too_long_by_the_pace_is_refused_at_once():
    queue = a_paced_queue(1.0)
    num_waiting = int(TTFT_SHARE * MAX_S)
    for index in range(num_waiting):
        push(queue, str(index), now=4.0)
    with pytest.raises(QueueFullError, match="max_ttft_s") as refused:
        push(queue, "more", now=4.0)
    assert refused.value.retry_after_s == pytest.approx(num_waiting / 2)


def test_however_slow_the_pace_one_may_wait():
    queue = a_paced_queue(100.0)
    push(queue, "one", now=400.0)
    with pytest.raises(QueueFullError):
        push(queue, "more", now=400.0)


def test_who_waits_in_a_worse_class_is_in_nobodys_way():
    queue = a_paced_queue(1.0)
    for index in range(int(TTFT_SHARE * MAX_S)):
        push(queue, str(index), priority=Priority.LOW, now=4.0)
    push(queue, "normal", now=4.0)
    with pytest.raises(QueueFullError):
        push(queue, "more", priority=Priority.LOW, now=4.0)


def test_a_tenant_with_less_than_its_share_of_the_wait_is_not_shut_out():
    queue = a_paced_queue(1.0)
    for index in range(int(TTFT_SHARE * MAX_S)):
        push(queue, str(index), tenant="flood", now=4.0)
    push(queue, "polite", tenant="polite", now=4.0)
    with pytest.raises(QueueFullError):
        push(queue, "more", tenant="flood", now=4.0)


def test_a_replica_gets_no_more_than_it_can_begin_in_time():
    core = a_core(max_waiting=64)
    attempts = [sent(core.submit(str(index))).attempt for index in range(4)]
    for index, attempt in enumerate(attempts):  # one begins every two seconds
        core.now += 2.0
        core.step(delta(attempt, 0, 1), load=load(num_running=index + 1))
    submissions = [core.submit(f"later {index}") for index in range(4)]
    assert [len(actions) for actions in submissions] == [1, 1, 0, 0], "at most 3 s of waiting, by a pace of 2 s"
    core.step(delta(attempts[0], 1, 1, finish=FinishReason.LENGTH), load=load(num_running=3))
    assert core.dispatch.num_queued == 2, "an end is no beginning"
    first = sent(submissions[0]).attempt
    assert sent(core.step(delta(first, 0, 1), load=load(num_running=4))).request.request_id == "later 2"
