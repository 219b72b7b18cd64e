"""The verdict on a counter that stands still: by time that was watched, with work, and by what is usual there."""

import pytest

from holdfast.worker.progress import FrozenVerdict, ProgressCounter


def watch(verdict: FrozenVerdict, counts: list[int], *, has_work=True, expected_step_s=0.0, every_s=0.1) -> list[bool]:
    """One look at each count, `every_s` apart."""
    return [
        verdict.look(count, has_work=has_work, expected_step_s=expected_step_s, now=number * every_s)
        for number, count in enumerate(counts)
    ]


def test_who_stands_still_with_work_for_a_second_is_frozen():
    looks = watch(FrozenVerdict(), [7] * 13)
    assert looks.index(True) in (10, 11)


def test_who_moves_is_never_frozen_however_long_a_step_lasts():
    assert not any(watch(FrozenVerdict(), [number // 8 for number in range(500)]))


def test_who_has_nothing_to_do_may_stand_still():
    verdict = FrozenVerdict()
    assert not any(watch(verdict, [7] * 100, has_work=False))
    assert not verdict.look(7, has_work=True, expected_step_s=0, now=10.0), "the time before the work does not count"


def test_a_replica_whose_steps_are_slow_gets_twenty_of_them():
    looks = watch(FrozenVerdict(), [7] * 110, expected_step_s=0.5)
    assert looks.index(True) in (100, 101)


@pytest.mark.parametrize("gap_s", [5.0, -5.0], ids=["held up", "clock set back"])
def test_time_that_nobody_watched_is_nobodys_fault(gap_s):
    """Whoever looks was stopped for a while, and then looks as often as ever: that must not condemn at once."""
    verdict = FrozenVerdict()
    watch(verdict, [7] * 5)
    assert not verdict.look(7, has_work=True, expected_step_s=0, now=0.4 + gap_s)


def seen(*steps: tuple[int, float]) -> ProgressCounter:
    """A counter that has seen steps of so many tokens and seconds."""
    progress = ProgressCounter()
    for num_tokens, step_s in steps:
        progress.begin_step(num_tokens)
        progress.end_step(num_tokens, step_s)
    return progress


@pytest.mark.parametrize(
    ("num_tokens", "expected_s"), [(1, 0.01), (4, 0.02), (7, 0.02), (8, 0.04), (500, 1.0), (511, 1.0), (2048, 8.0)]
)
def test_a_step_is_expected_to_take_what_steps_of_its_size_took(num_tokens, expected_s):
    """Of a size that was not seen yet: at most as much longer than the next smaller one as it is larger."""
    progress = seen(*[(5, 0.02)] * 50, (400, 1.0), *[(1, 0.01)] * 50)
    progress.begin_step(num_tokens)
    assert progress.expected_step_s == pytest.approx(expected_s)


def test_what_is_usual_follows_what_happens():
    progress = seen((1, 0.01), *[(1, 0.1)] * 100)
    progress.begin_step(1)
    assert progress.expected_step_s == pytest.approx(0.1, rel=0.01)


def test_before_anything_was_seen_nothing_is_expected():
    progress = ProgressCounter()
    progress.begin_step(100)
    assert progress.expected_step_s == 0
    progress = seen((100, 0.5))
    progress.begin_step(1)
    assert progress.expected_step_s == 0.5, "larger than it will be, which is the safe side"


def test_the_counter_moves_at_both_ends_of_a_step():
    progress = ProgressCounter()
    progress.begin_step(1)
    progress.tick()
    progress.end_step(1, 0.1)
    assert progress.count == 3
