"""How soon a router finds a leader that was stopped, in virtual time: whatever steps take, whenever it is stopped."""

import pytest

from holdfast.router.links.replica_link import LOOK_EVERY_S, LinkWatch
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.step_update import Heartbeat

HEARTBEAT_S, FROZEN_AFTER_S = 0.2, 1.0
TICK_S = 0.005


class Leader:
    """A leader that runs one step after the other, without layers that count, and beats as a replica does."""

    def __init__(self, watch: LinkWatch, step_s: float) -> None:
        self._watch = watch
        self._step_s = step_s
        self._now = -step_s
        self._progress = ProgressCounter()
        self._progress.clock = lambda: self._now
        self._progress.begin_step(64)
        self._step(0.0)  # a replica has run steps before it serves
        self._next_step_s, self._next_beat_s = step_s, HEARTBEAT_S

    def live_until(self, now: float) -> None:
        while self._next_step_s <= now:
            self._step(self._next_step_s)
            self._watch.note_step()
            self._next_step_s += self._step_s
        while self._next_beat_s <= now:
            progress = self._progress
            self._watch.note_heartbeat(Heartbeat(progress=progress.count, expected_gap_s=progress.expected_gap_s))
            self._next_beat_s += HEARTBEAT_S

    def _step(self, now: float) -> None:
        """The step now running ends, and the next one begins."""
        self._now = now
        self._progress.end_step(64)
        self._progress.begin_step(64)


def found_after_s(step_s: float, stopped_s: float, *, limit_s: float = 60.0) -> float | None:
    """Seconds from the stop of a leader to the verdict; None for no verdict before `limit_s`."""
    now = 0.0
    watch = LinkWatch(lambda: True, FROZEN_AFTER_S, HEARTBEAT_S, lambda: now)
    leader = Leader(watch, step_s)
    for number in range(1, round(limit_s / TICK_S)):
        now = number * TICK_S
        leader.live_until(min(now, stopped_s))
        if number % round(LOOK_EVERY_S / TICK_S) == 0 and watch.look():
            return now - stopped_s
    return None


@pytest.mark.parametrize("step_s", [0.005, 0.05, 0.155, 0.7, 3.0])
def test_a_stopped_leader_is_found_within_two_seconds_however_long_its_steps_are(step_s):
    """Heartbeats do not wait for steps, so their silence needs no allowance for long ones."""
    stops_s = [10 * step_s + phase * 0.045 for phase in range(40)]
    found_s = [found_after_s(step_s, stopped_s) for stopped_s in stops_s]
    assert all(0.0 < found < 2.0 for found in found_s), max(found_s)


@pytest.mark.parametrize("step_s", [0.005, 0.155, 0.7, 3.0])
def test_a_leader_whose_steps_are_long_is_not_taken_for_a_stopped_one(step_s):
    """It has heartbeats, which say how long it should take to the next count."""
    assert found_after_s(step_s, stopped_s=60.0, limit_s=60.0) is None


def test_a_leader_that_beats_and_does_not_get_on_has_twenty_times_its_longest_gap():
    now = 0.0
    watch = LinkWatch(lambda: True, FROZEN_AFTER_S, HEARTBEAT_S, lambda: now)
    watch.look()
    for number in range(1, 400):
        now = number * LOOK_EVERY_S
        if number % 2 == 0:
            watch.note_heartbeat(Heartbeat(progress=7, expected_gap_s=0.5))
        if watch.look():
            break
    assert now == pytest.approx(10.2, abs=0.2)


def beats_until_frozen_s(starved_share: float, limit_s: float = 30.0) -> float | None:
    """Seconds to the verdict on a replica that beats, has no progress, and says so much of the time was not its own."""
    now = 0.0
    watch = LinkWatch(lambda: True, FROZEN_AFTER_S, HEARTBEAT_S, lambda: now)
    for number in range(1, round(limit_s / LOOK_EVERY_S)):
        now = number * LOOK_EVERY_S
        watch.note_heartbeat(Heartbeat(progress=7, expected_gap_s=0.0, starved_s=starved_share * now))
        if watch.look():
            return now
    return None


def test_time_without_a_core_is_not_held_against_a_replica():
    assert beats_until_frozen_s(0.0) == pytest.approx(1.1, abs=0.2)
    assert beats_until_frozen_s(0.8) == pytest.approx(5.1, abs=0.5), "what it had and did not use counts"
    assert beats_until_frozen_s(1.0) is None


def test_silence_of_a_replica_without_work_of_ours_means_nothing():
    now = 0.0
    watch = LinkWatch(lambda: False, FROZEN_AFTER_S, HEARTBEAT_S, lambda: now)
    for number in range(600):
        now = number * LOOK_EVERY_S
        assert not watch.look()
