"""The router's queue: order, bound, and the estimate of when to come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission import MAX_RETRY_S, MIN_RETRY_S, AdmissionQueue
from worker.errors import QueueFullError
from worker.request import Priority


def drained(queue: AdmissionQueue, model: str = "m") -> list[str]:
    order = []
    while queue.has_waiting(model):
        order.append(queue.pop(model, now=0.0))
    return order


def test_priority_goes_before_arrival():
    queue = AdmissionQueue(10)
    queue.push("first", "m", Priority.NORMAL)
    queue.push("second", "m", Priority.NORMAL)
    queue.push("low", "m", Priority.LOW)
    queue.push("critical", "m", Priority.CRITICAL)
    assert drained(queue) == ["critical", "first", "second", "low"]


def test_models_do_not_hold_each_other_up():
    queue = AdmissionQueue(10)
    queue.push("a1", "a", Priority.CRITICAL)
    queue.push("b1", "b", Priority.LOW)
    assert queue.pop("b", now=0.0) == "b1"
    assert queue.has_waiting("a")
    assert not queue.has_waiting("b")


def test_a_full_queue_refuses_and_says_when_to_come_back():
    queue = AdmissionQueue(1)
    queue.push("x", "m", Priority.NORMAL)
    with pytest.raises(QueueFullError, match="max_queued") as refused:
        queue.push("y", "m", Priority.CRITICAL)
    assert refused.value.retry_after_s == 1.0
    assert "y" not in queue


def test_the_estimate_follows_the_pace_of_departures():
    queue = AdmissionQueue(100)
    for index in range(41):
        queue.push(str(index), "m", Priority.NORMAL)
    for index in range(21):
        queue.pop("m", now=0.5 * index)
    assert queue.retry_after_s() == pytest.approx(0.5 * 20 / 2)


def test_an_idle_time_does_not_count_as_a_slow_pace():
    queue = AdmissionQueue(100)
    for start in (0.0, 1000.0):
        queue.push("a", "m", Priority.NORMAL)
        queue.push("b", "m", Priority.NORMAL)
        queue.pop("m", now=start)
        queue.pop("m", now=start + 2.0)
    for index in range(4):
        queue.push(str(index), "m", Priority.NORMAL)
    assert queue.retry_after_s() == pytest.approx(2.0 * 4 / 2)


def test_the_estimate_is_bounded():
    queue = AdmissionQueue(10_000)
    for index in range(1002):
        queue.push(str(index), "m", Priority.NORMAL)
    queue.pop("m", now=0.0)
    queue.pop("m", now=100.0)
    assert queue.retry_after_s() == MAX_RETRY_S
    drained(queue)
    assert queue.retry_after_s() == MIN_RETRY_S


@given(
    st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.sampled_from("ab"), st.sampled_from(Priority)))
)
def test_any_order_of_operations_keeps_order_and_books(operations):
    queue, waiting, number = AdmissionQueue(5), [], 0
    for operation, model, priority in operations:
        mine = sorted((entry for entry in waiting if entry[0] == model), key=lambda entry: entry[1:])
        if operation == "push" and len(waiting) < 5:
            number += 1
            queue.push(str(number), model, priority)
            waiting.append((model, priority, number))
        elif operation == "pop" and mine:
            assert queue.pop(model, now=float(number)) == str(mine[0][2])
            waiting.remove(mine[0])
        elif operation == "remove" and mine:
            queue.remove(str(mine[-1][2]))
            waiting.remove(mine[-1])
        queue.check_integrity()
        assert len(queue) == len(waiting)
        assert list(queue.waiting(model)) == [
            str(entry[2]) for entry in sorted((e for e in waiting if e[0] == model), key=lambda e: e[1:])
        ]
