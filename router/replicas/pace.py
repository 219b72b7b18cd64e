"""Pace: the mean pause between events that follow each other while more of them are due.

Of a queue that is never empty it is the reciprocal of the service rate, and so `num_ahead` pauses are an estimate of
the wait. Times in which nothing is due say nothing about the rate and do not count. What may not live here: clocks, and
what follows from a wait (`replica_state.py`, `router/dispatch/admission.py`).
"""

from typing import Final

_KEPT: Final = 0.95
"""Weight of a pause against the one after it: about the last 20 count."""


class Pace:
    """Of one kind of events."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._sum_s = 0.0
        self._weight = 0.0

    def note(self, now: float, *, more_due: bool) -> None:
        """An event has happened, and another one is due or not."""
        if self._last is not None:
            self._sum_s = _KEPT * self._sum_s + max(now - self._last, 0.0)
            self._weight = _KEPT * self._weight + 1.0
        self._last = now if more_due else None

    def note_idle(self) -> None:
        """Nothing is due any more, without an event: what was due has been given up."""
        self._last = None

    @property
    def mean_s(self) -> float | None:
        """None as long as no two events followed each other."""
        return self._sum_s / self._weight if self._weight else None

    def wait_s(self, num_ahead: int) -> float:
        """Estimated wait behind so many; 0 while nothing is known."""
        return num_ahead * (self.mean_s or 0.0)
