"""Meters over sliding windows: a rate from counts that only grow, and a mean, a greatest value and a trend of a figure.

Time is passed in, in seconds of any one clock. What may not live here: what is measured, and why (`autoscaler.py`).
"""

from collections import deque


class Rate:
    """Counts a second over the last `window_s`. A count that falls, after a restart, begins anew."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._counts = deque[tuple[float, float]]()

    def note(self, now_s: float, count: float) -> None:
        if self._counts and count < self._counts[-1][1]:
            self._counts.clear()
        self._counts.append((now_s, count))
        while len(self._counts) > 2 and self._counts[1][0] <= now_s - self._window_s:
            self._counts.popleft()

    @property
    def per_s(self) -> float:
        """0 before there are two counts."""
        if len(self._counts) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._counts[0], self._counts[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class Level:
    """Values of a figure over the last `keep_s`."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._values = deque[tuple[float, float]]()

    def note(self, now_s: float, value: float) -> None:
        self._values.append((now_s, value))
        while self._values[0][0] < now_s - self._keep_s:
            self._values.popleft()

    def mean(self, from_s: float, to_s: float) -> float | None:
        """Of the values between two times; None where there are none."""
        inside = [value for time_s, value in self._values if from_s <= time_s <= to_s]
        return sum(inside) / len(inside) if inside else None

    def greatest(self, from_s: float) -> float:
        """Since a time; 0 where there are none."""
        return max((value for time_s, value in self._values if time_s >= from_s), default=0.0)

    def growth_per_s(self, now_s: float, span_s: float) -> float:
        """How fast the mean over `span_s` grows, against that of the span before it; 0 where it is not known."""
        late, early = self.mean(now_s - span_s, now_s), self.mean(now_s - 2 * span_s, now_s - span_s)
        return 0.0 if late is None or early is None else (late - early) / span_s
