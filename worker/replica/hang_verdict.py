"""Hang verdict: whether a process hangs, by its heartbeats and the CPU time that it has used. No IO."""

import math
from typing import Final

from holdfast.worker.progress import LONGEST_LOOK_S, FrozenVerdict

BEAT: Final = b"."
"""Byte that a process sends through the pipe. From its event loop: it turns."""

INPUT: Final = b"i"
"""Work on input begins on it."""

LARGE_INPUT: Final = b"I"
"""Work on input begins that may keep the loop, or Python's lock, for long."""

BUSY_TIMES: Final = 6.0
"""Factor on the limit for a process that is computing on input: it is killed after that time without a heartbeat."""

BUSY_SHARE: Final = 0.5
"""Share of a look's time that all threads together ran, or waited for a core, in a process that computes."""

LARGE_BYTES: Final = 64 * 2**10
"""Input of at least this size is always declared; smaller input as often as there are beats."""

_BEAT_EVERY_S: Final = 0.5


def beat_every_s(limit_s: float) -> float:
    """Seconds between beats of a process that is ended after `limit_s` without one."""
    return min(_BEAT_EVERY_S, limit_s / 4)


def look_every_s(limit_s: float) -> float:
    """Seconds between looks of its hang supervisor."""
    return min(LONGEST_LOOK_S, limit_s / 8)


class InputSigns:
    """The declared work on input of a process: all large items, and others once per beat."""

    def __init__(self, limit_s: float) -> None:
        self._every_s = beat_every_s(limit_s)
        self._declared_at = -math.inf

    def of(self, num_bytes: int, now: float) -> bytes:
        """Bytes to send when work on input of this size begins; empty if the same was sent just before."""
        is_large = num_bytes >= LARGE_BYTES
        if not is_large and now - self._declared_at < self._every_s:
            return b""
        self._declared_at = now
        return LARGE_INPUT if is_large else INPUT


class HangVerdict:
    """The rule: no sign of life for `limit_s`, where a beat is one, and so is input whose work begins. A process that
    computes on large input is busy, and needs none; time in which it waits for a core does not count. Without a beat
    for `BUSY_TIMES` the limit it counts as hanging in any case.

    No clock: the time is passed in. Only watched time counts (`FrozenVerdict`).
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stillness = FrozenVerdict(limit_s)
        self._silence = FrozenVerdict(BUSY_TIMES * limit_s)
        self._num_signs = self._num_beats = 0
        self._has_large_input = False
        """Some was declared since the last beat."""
        self._looked: tuple[float, float] | None = None
        """When, and the CPU time then."""
        self._idle_s = 0.0
        """Seconds without computation, at a stretch."""
        self._starved_s = 0.0
        """Seconds that it has waited for a core."""

    @property
    def still_s(self) -> float:
        """Seconds, as far as they were watched, without a sign of life."""
        return self._stillness.still_s

    def look(self, news: bytes, cpu_s: float, *, is_traced: bool, now: float, starved_s: float = 0.0) -> bool:
        """Whether it hangs. `news` has come over the pipe since the last look; `cpu_s` is its CPU time so far.
        `starved_s`: seconds since the last look in which it waited for a core.
        """
        self._starved_s += starved_s
        self._num_signs += len(news)
        self._num_beats += news.count(BEAT)
        *_, since_beat = news.rpartition(BEAT)
        self._has_large_input = LARGE_INPUT in since_beat or (self._has_large_input and BEAT not in news)
        self._note_cpu(cpu_s, now)
        is_watched = self._num_beats > 0 and not is_traced
        is_still = self._stillness.look(
            self._num_signs, has_work=is_watched, expected_gap_s=0.0, now=now, starved_s=self._starved_s
        )
        is_silent = self._silence.look(self._num_beats, has_work=is_watched, expected_gap_s=0.0, now=now)
        return is_silent or (is_still and not self._is_busy)

    @property
    def _is_busy(self) -> bool:
        return self._has_large_input and self._idle_s < self._limit_s / 2

    def _note_cpu(self, cpu_s: float, now: float) -> None:
        if self._looked is not None:
            looked_at, cpu_then_s = self._looked
            elapsed_s = now - looked_at
            is_idle = cpu_s - cpu_then_s < BUSY_SHARE * elapsed_s
            self._idle_s = self._idle_s + min(elapsed_s, LONGEST_LOOK_S) if is_idle else 0.0
        self._looked = now, cpu_s
