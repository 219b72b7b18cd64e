"""Token bucket: the amount that a rate allows by now. Without IO: the caller passes the time, in seconds of any one
clock.
"""

from typing import Final

BURST_S: Final = 10.0
"""Seconds of its rate that a bucket holds by default: the burst after a pause."""

A_HAIR: Final = 1e-6
"""Times are sums of floats: a wait that has been kept is over."""


class TokenBucket:
    """Fills steadily up to its capacity. Full at first."""

    def __init__(self, per_s: float, capacity: float | None = None) -> None:
        self.per_s = per_s
        self.capacity = max(1.0, per_s * BURST_S) if capacity is None else capacity
        self.level = self.capacity
        """Level at the last call. Read-only."""
        self._at = 0.0

    def wait_s(self, now: float, least: float) -> float:
        """Seconds until it holds `least`; 0 if it does."""
        self._fill(now)
        return self._missing(least) / self.per_s

    def ready_at(self, least: float) -> float | None:
        """When it will hold `least`; None if it did at the last call that passed the time, or has got it since."""
        missing = self._missing(least)
        return self._at + missing / self.per_s if missing else None

    def take(self, amount: float, now: float) -> None:
        """Takes so much out, whether it holds so much or not."""
        self._fill(now)
        self.level -= amount

    def give(self, amount: float) -> None:
        """Puts so much in, up to the capacity."""
        self.level = min(self.capacity, self.level + amount)

    def _missing(self, least: float) -> float:
        missing = least - self.level
        return missing if missing > A_HAIR else 0.0

    def _fill(self, now: float) -> None:
        self.give(max(0.0, now - self._at) * self.per_s)
        self._at = max(now, self._at)
