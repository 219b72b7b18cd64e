"""Deadlines against a plain dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.dispatch.deadlines import Deadlines


def test_what_is_dropped_does_not_pile_up():
    deadlines = Deadlines()
    for index in range(10_000):
        deadlines.set(str(index), 1000.0 + index)
        deadlines.drop(str(index))
    assert len(deadlines) == 0
    assert len(deadlines._heap) < 100


def test_an_id_may_come_back_with_another_deadline():
    deadlines = Deadlines()
    deadlines.set("x", 5.0)
    deadlines.drop("x")
    deadlines.set("x", 9.0)
    assert deadlines.next == 9.0
    assert deadlines.passed(8.0) == []


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 20))))
def test_next_and_passed_agree_with_a_dictionary(operations):
    deadlines, known = Deadlines(), {}
    for request_id, when in operations:
        if request_id in known:
            deadlines.drop(request_id)
            del known[request_id]
        else:
            deadlines.set(request_id, float(when))
            known[request_id] = float(when)
        assert deadlines.next == min(known.values(), default=None)
        due = sorted((deadline, key) for key, deadline in known.items() if deadline <= when)
        assert deadlines.passed(float(when)) == [key for _, key in due]
        assert all(key in deadlines for key in known)
