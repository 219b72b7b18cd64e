"""Times of sequences: the first that is due comes first, and what was dropped is forgotten."""

from holdfast.worker.scheduling.sequence import Sequence
from holdfast.worker.scheduling.timers import SequenceTimers
from tests.worker.schedulers import make_request


def make_sequences(number: int) -> list[Sequence]:
    return [Sequence(i, make_request(str(i)), max_model_len=50, eos_token_ids=frozenset()) for i in range(number)]


def test_they_come_in_order_and_not_before_they_are_due():
    timers = SequenceTimers()
    a, b, c = make_sequences(3)
    for sequence, when in ((a, 3.0), (b, 1.0), (c, 9.0)):
        timers.set(sequence, when)
    assert [timers.pop(5.0), timers.pop(5.0), timers.pop(5.0)] == [b, a, None]
    assert len(timers) == 1


def test_a_new_time_replaces_the_old_one():
    timers = SequenceTimers()
    (a,) = make_sequences(1)
    timers.set(a, 1.0)
    timers.set(a, 4.0)
    assert timers.pop(3.0) is None
    assert timers.pop(4.0) is a
    assert timers.pop(4.0) is None


def test_what_was_dropped_does_not_come_and_does_not_pile_up():
    timers = SequenceTimers()
    for sequence in make_sequences(1000):
        timers.set(sequence, 1e9)
        timers.drop(sequence)
        timers.drop(sequence)
    assert (len(timers), timers.pop(1e10)) == (0, None)
    for sequence in make_sequences(1000):
        timers.set(sequence, 1e9)
        timers.drop(sequence)
        assert len(timers._heap) < 100
