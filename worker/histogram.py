"""Histogram: counts of values up to each bound, as Prometheus draws them. A pure value.

What may not live here: what is counted, clocks, how it is published (`router/metrics/`).
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

TIMES_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_TIMES_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Of single tokens and of single steps."""


class Histogram:
    """Counts of values up to each bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(
        self, bounds: Sequence[float] = TIMES_S, counts: Sequence[int] | None = None, total: float = 0.0
    ) -> None:
        """`counts` and `total`: what was counted elsewhere, by the same bounds."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1) if counts is None else list(counts)
        """By bound, and of all that are above; not cumulative."""
        assert len(self.counts) == len(bounds) + 1, f"{len(self.counts)} counts for {len(bounds)} bounds"
        self.total = total

    def note(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def num_values(self) -> int:
        return sum(self.counts)
