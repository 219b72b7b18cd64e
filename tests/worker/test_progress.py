"""The verdict on a counter that stands still: by time that was watched, with work, and by what is usual there."""

import pytest

from holdfast.worker.progress import FrozenVerdict, ProgressCounter


def watch(verdict: FrozenVerdict, counts: list[int], *, has_work=True, expected_gap_s=0.0, every_s=0.1) -> list[bool]:
    """One look at each count, `every_s` apart."""
    return [
        verdict.look(count, has_work=has_work, expected_gap_s=expected_gap_s, now=number * every_s)
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
    assert not verdict.look(7, has_work=True, expected_gap_s=0, now=10.0), "the time before the work does not count"


def test_a_replica_that_counts_seldom_gets_twenty_times_as_long():
    looks = watch(FrozenVerdict(), [7] * 110, expected_gap_s=0.5)
    assert looks.index(True) in (100, 101)


@pytest.mark.parametrize("gap_s", [5.0, -5.0], ids=["held up", "clock set back"])
def test_time_that_nobody_watched_is_nobodys_fault(gap_s):
    """Whoever looks was stopped for a while, and then looks as often as ever: that must not condemn at once."""
    verdict = FrozenVerdict()
    watch(verdict, [7] * 5)
    assert not verdict.look(7, has_work=True, expected_gap_s=0, now=0.4 + gap_s)


class Steps:
    """Steps run one after the other by a clock of their own, and the counter that they move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.progress = ProgressCounter()
        self.progress.clock = lambda: self.now

    def run(self, num_tokens: int, *gaps_s: float, times: int = 1) -> "Steps":
        """Steps of so many tokens: a layer counts after each gap but the last, which ends the step."""
        for _ in range(times):
            self.now += 7.0  # between two steps
            self.progress.begin_step(num_tokens)
            for gap_s in gaps_s[:-1]:
                self.now += gap_s
                self.progress.tick()
            self.now += gaps_s[-1]
            self.progress.end_step(num_tokens)
        return self

    def expected_gap_s(self, num_tokens: int) -> float:
        """Of a step that begins now."""
        self.progress.begin_step(num_tokens)
        return self.progress.expected_gap_s


@pytest.mark.parametrize(
    ("num_tokens", "expected_s"), [(1, 0.01), (4, 0.02), (7, 0.02), (8, 0.04), (500, 1.0), (511, 1.0), (2048, 8.0)]
)
def test_a_step_is_expected_to_have_the_gaps_that_steps_of_its_size_had(num_tokens, expected_s):
    """Of a size that was not seen yet: at most as much longer than the next smaller one as it is larger."""
    steps = Steps().run(5, 0.02, times=50).run(400, 1.0).run(1, 0.01, times=50)
    assert steps.expected_gap_s(num_tokens) == pytest.approx(expected_s)


def test_of_a_step_the_longest_gap_counts_and_not_the_whole():
    steps = Steps().run(1, 0.01, 0.03, 0.02)
    assert steps.expected_gap_s(1) == pytest.approx(0.03)


def test_layers_that_all_count_at_once_leave_the_whole_step_to_wait_for():
    """As on a GPU, where a layer counts when it is launched."""
    steps = Steps().run(1, 0.0, 0.0, 0.0, 0.5)
    assert steps.expected_gap_s(1) == pytest.approx(0.5)


def test_what_is_usual_follows_what_happens():
    steps = Steps().run(1, 0.01).run(1, 0.1, times=100)
    assert steps.expected_gap_s(1) == pytest.approx(0.1, rel=0.01)


def test_before_anything_was_seen_nothing_is_expected():
    assert Steps().expected_gap_s(100) == 0
    larger_than_it_will_be = Steps().run(100, 0.5).expected_gap_s(1)
    assert larger_than_it_will_be == 0.5, "which is the safe side"


def test_the_counter_moves_at_both_ends_of_a_step():
    assert Steps().run(1, 0.1, 0.1).progress.count == 3


@pytest.mark.parametrize(("step_s", "num_layers"), [(0.155, 24), (0.7, 24), (3.0, 60)])
def test_a_frozen_rank_is_found_within_two_seconds_however_long_the_steps_are(step_s, num_layers):
    """The leader waits for it in a layer: what it should take until the next count is a layer's time."""
    steps = Steps().run(64, *[step_s / num_layers] * num_layers, times=20)
    expected_gap_s = steps.expected_gap_s(64)
    looks = watch(FrozenVerdict(), [steps.progress.count] * 60, expected_gap_s=expected_gap_s)
    assert looks.index(True) * 0.1 < 2.0
