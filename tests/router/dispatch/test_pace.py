"""The pace of events: the mean pause while more are due, and nothing of the times between."""

import pytest

from holdfast.router.dispatch.replica_state import Pace


def test_nothing_is_known_before_two_events_followed_each_other():
    pace = Pace()
    assert pace.mean_s is None
    pace.note(1.0, more_due=False)
    pace.note(9.0, more_due=True)
    assert pace.mean_s is None
    assert pace.wait_s(5) == 0


def test_idle_times_do_not_count():
    pace = Pace()
    for start in (0.0, 100.0, 200.0):
        pace.note(start, more_due=True)
        pace.note(start + 2.0, more_due=False)
    pace.note(300.0, more_due=True)
    pace.note_idle()
    pace.note(400.0, more_due=True)
    assert pace.mean_s == pytest.approx(2.0)
    assert pace.wait_s(3) == pytest.approx(6.0)


def test_events_at_once_count_by_their_mean_and_old_ones_fade():
    pace = Pace()
    for step in range(400):
        pace.note(float(step // 4), more_due=True)
    assert pace.mean_s == pytest.approx(0.25, rel=0.1)
    for step in range(200):
        pace.note(100.0 + 5.0 * step, more_due=True)
    assert pace.mean_s == pytest.approx(5.0, rel=0.01)
