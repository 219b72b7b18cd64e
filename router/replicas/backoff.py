"""Exponential backoff with jitter, for replicas that do not answer.

A pure core. What may not live here: dialling (`router/links/link.py`), when a client gives up
(`cluster/client/retry_policy.py`), random numbers: they are passed in.
"""

from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_S: Final = 0.05
MAX_DOUBLINGS: Final = 10
FORGIVEN_S: Final = 60.0
"""A session that lasted this long resets the count of faulty sessions."""


@dataclass(slots=True, kw_only=True)
class Backoff:
    """The pauses between connection attempts of one link."""

    max_pause_s: float
    num_failed: int = 0
    """Failed connection attempts in a row."""
    num_faults: int = 0
    """Short sessions in a row that ended by a bug of ours, or by a message that cannot be read. Their dials succeed, so
    `num_failed` does not count them."""

    def note_up(self) -> None:
        """A connection attempt succeeded."""
        self.num_failed = 0

    def note_fault(self, lasted_s: float) -> None:
        """A session ended by a fault of either side after `lasted_s`. Its cause may still be there."""
        self.num_faults = 1 if lasted_s >= FORGIVEN_S else self.num_faults + 1

    def note_failure(self) -> None:
        """A connection attempt failed."""
        self.num_failed += 1

    def pause_s(self, uniform: float) -> float:
        """The pause before the next dial; `uniform` as for `growing_pause_s`."""
        return growing_pause_s(max(self.num_failed, self.num_faults), self.max_pause_s, uniform)


def growing_pause_s(num_doublings: int, max_pause_s: float, uniform: float, hint_s: float = 0.0) -> float:
    """`FIRST_PAUSE_S` doubled `num_doublings` times, at most `max_pause_s`, but at least `hint_s` of a server.

    Jitter then takes away up to half, to spread out clients that failed together: `uniform` is random in [0, 1).
    """
    longest_s = max(hint_s, min(FIRST_PAUSE_S * 2.0 ** min(num_doublings, MAX_DOUBLINGS), max_pause_s))
    return longest_s * (1 + uniform) / 2
