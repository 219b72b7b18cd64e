"""First tokens of the requests of one model: how many requests came, how many have begun to be answered, how soon.

A request that goes on after tokens of another router, or of a replica that was lost, has had its first token.

What may live here: the counts. What may not: clocks, and what follows from them (`cluster/scaling/`).
"""

from collections import deque
from typing import Final

RECENT_S: Final = 30.0
NUM_RECENT: Final = 512
SHARE: Final = 0.9


class FirstTokens:
    """Counts of one router."""

    def __init__(self) -> None:
        self.num_arrived = 0
        self.num_first_tokens = 0
        self.num_left = 0
        """Of those that arrived: their clients have left before the first token, and wait for none here."""
        self._recent = deque[tuple[float, float]](maxlen=NUM_RECENT)

    def note(self, opened_s: float, now: float) -> None:
        """A request that came at `opened_s` has its first token."""
        self.num_first_tokens += 1
        self._recent.append((now, now - opened_s))

    def ttft_s(self, now: float) -> float:
        """The time that nine of ten requests kept to, of those whose first token came lately; 0 of none."""
        while self._recent and self._recent[0][0] < now - RECENT_S:
            self._recent.popleft()
        ordered = sorted(ttft_s for _, ttft_s in self._recent)
        return ordered[int(SHARE * (len(ordered) - 1))] if ordered else 0.0
