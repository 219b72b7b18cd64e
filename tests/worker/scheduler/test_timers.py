"""Timers against a plain dictionary: the first that is due comes first, and what was dropped is forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.timers import Timers


def test_they_come_in_order_and_not_before_they_are_due():
    timers = Timers[str]()
    for key, when in (("a", 3.0), ("b", 1.0), ("c", 9.0)):
        timers.set(key, when)
    assert [timers.pop(5.0), timers.pop(5.0), timers.pop(5.0)] == ["b", "a", None]
    assert len(timers) == 1


def test_a_new_time_replaces_the_old_one():
    timers = Timers[str]()
    timers.set("a", 1.0)
    timers.set("a", 4.0)
    assert timers.next == timers.of("a") == 4.0
    assert timers.pop(3.0) is None
    assert timers.pop(4.0) == "a"
    assert timers.pop(4.0) is None


def test_a_key_that_was_dropped_and_set_again_comes_once():
    timers = Timers[str]()
    timers.set("a", 1.0)
    timers.drop("a")
    timers.set("b", 1.0)
    timers.set("a", 1.0)
    assert [timers.pop(1.0), timers.pop(1.0), timers.pop(1.0)] == ["b", "a", None]


def test_what_was_dropped_does_not_pile_up():
    timers = Timers[int]()
    for key in range(10_000):
        timers.set(key, 1e9 + key)
        timers.drop(key)
        timers.drop(key)
        assert len(timers._heap) < 100
    assert (len(timers), timers.pop(1e10)) == (0, None)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 20), st.sampled_from(["set", "drop", "pop"]))))
def test_they_agree_with_a_dictionary(operations):
    timers, known = Timers[str](), {}
    for number, (key, when, operation) in enumerate(operations):
        if operation == "set":
            timers.set(key, float(when))
            known[key] = (float(when), number)
        elif operation == "drop":
            timers.drop(key)
            known.pop(key, None)
        else:
            due = min((entry for entry in known.items() if entry[1][0] <= when), key=lambda item: item[1], default=None)
            assert timers.pop(float(when)) == (due and due[0])
            known.pop(due and due[0], None)
        assert len(timers) == len(known)
        assert timers.next == min((entry[0] for entry in known.values()), default=None)
        assert {key for key in "abcdef" if key in timers} == known.keys()
