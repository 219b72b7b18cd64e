"""The router's queue: order, bound, and the estimate of when to come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.dispatch.admission import MAX_RETRY_S, MIN_RETRY_S, AdmissionQueue
from holdfast.worker.errors import QueueFullError
from holdfast.worker.request import Priority


def drained(queue: AdmissionQueue, model: str = "m") -> list[str]:
    order = []
    while queue.first(model) is not None:
        order.append(popped(queue, model))
    return order


def popped(queue: AdmissionQueue, model: str = "m", now: float = 0.0) -> str:
    request_id = queue.first(model)
    queue.pop(request_id, now)
    return request_id


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
    assert popped(queue, "b") == "b1"
    assert queue.has_any("a")
    assert not queue.has_any("b")


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
        popped(queue, now=0.5 * index)
    assert queue.retry_after_s() == pytest.approx(0.5 * 20 / 2)


def test_an_idle_time_does_not_count_as_a_slow_pace():
    queue = AdmissionQueue(100)
    for start in (0.0, 1000.0):
        queue.push("a", "m", Priority.NORMAL)
        queue.push("b", "m", Priority.NORMAL)
        popped(queue, now=start)
        popped(queue, now=start + 2.0)
    for index in range(4):
        queue.push(str(index), "m", Priority.NORMAL)
    assert queue.retry_after_s() == pytest.approx(2.0 * 4 / 2)


def test_the_estimate_is_bounded():
    queue = AdmissionQueue(10_000)
    for index in range(1002):
        queue.push(str(index), "m", Priority.NORMAL)
    popped(queue, now=0.0)
    popped(queue, now=100.0)
    assert queue.retry_after_s() == MAX_RETRY_S
    drained(queue)
    assert queue.retry_after_s() == MIN_RETRY_S


def test_what_comes_back_goes_first_in_its_class_whatever_the_bound():
    queue = AdmissionQueue(1)
    queue.push("new", "m", Priority.NORMAL)
    for name in ("back", "back too"):
        queue.put_back(name, "m", Priority.NORMAL)
    queue.put_back("low", "m", Priority.LOW)
    queue.check_integrity()
    with pytest.raises(QueueFullError):
        queue.push("critical", "m", Priority.CRITICAL)
    assert drained(queue) == ["back", "back too", "new", "low"]


def test_what_is_held_leaves_only_by_name():
    queue = AdmissionQueue(1)
    queue.hold("x", "m")
    assert queue.first("m") is None
    assert queue.first_held("m") == "x"
    assert list(queue.waiting("m")) == ["x"]
    assert "x" in queue
    assert queue.has_any("m")
    queue.check_integrity()
    queue.remove("x")
    assert len(queue) == 0
    assert not queue.has_any("m")


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
            assert popped(queue, model, now=float(number)) == str(mine[0][2])
            waiting.remove(mine[0])
        elif operation == "remove" and mine:
            queue.remove(str(mine[-1][2]))
            waiting.remove(mine[-1])
        queue.check_integrity()
        assert len(queue) == len(waiting)
        assert list(queue.waiting(model)) == [
            str(entry[2]) for entry in sorted((e for e in waiting if e[0] == model), key=lambda e: e[1:])
        ]
