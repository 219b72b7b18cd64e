"""The verdict on a replica that makes no progress."""

from worker.progress import FrozenVerdict


def steady(step_s: float, num_steps: int = 50) -> tuple[FrozenVerdict, float]:
    """A verdict after so many steps of work, and the time of the last one."""
    verdict = FrozenVerdict()
    verdict.has_work(True)
    now = 0.0
    for step in range(num_steps):
        assert not verdict.is_frozen(now)
        now += step_s
        verdict.note_progress(step + 1, now)
    return verdict, now


def test_who_makes_no_progress_for_a_second_is_frozen():
    verdict, now = steady(0.01)
    assert not verdict.is_frozen(now + 1.0)
    assert verdict.is_frozen(now + 1.01)


def test_who_is_slow_as_usual_gets_twenty_times_the_usual():
    verdict, now = steady(0.5)
    assert not verdict.is_frozen(now + 9.9)
    assert verdict.is_frozen(now + 10.1)


def test_a_counter_that_stands_still_is_no_progress():
    verdict, now = steady(0.01)
    verdict.note_progress(50, now + 0.9)
    assert verdict.is_frozen(now + 1.1)


def test_who_has_nothing_to_do_is_not_frozen():
    verdict, now = steady(0.01)
    verdict.has_work(False)
    assert not verdict.is_frozen(now + 100)


def test_the_wait_begins_with_the_work():
    verdict, now = steady(0.01)
    verdict.has_work(False)
    verdict.has_work(True)
    assert not verdict.is_frozen(now + 100)
    assert not verdict.is_frozen(now + 101)
    assert verdict.is_frozen(now + 101.1)


def test_an_idle_night_is_no_usual_pause():
    verdict, now = steady(0.01)
    verdict.has_work(False)
    verdict.has_work(True)
    assert not verdict.is_frozen(now + 1000)
    verdict.note_progress(51, now + 1000.01)
    assert verdict.limit_s == 1.0


def test_one_long_pause_does_not_make_long_pauses_usual():
    verdict, now = steady(0.01)
    verdict.note_progress(51, now + 500)
    assert verdict.limit_s < 4


def test_a_clock_that_goes_backwards_begins_the_wait_anew():
    verdict, now = steady(0.01)
    assert not verdict.is_frozen(now - 50)
    assert not verdict.is_frozen(now - 49.1)
    assert verdict.is_frozen(now - 48.9)
