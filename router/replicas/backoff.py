"""How long whoever does not answer is left alone before it is asked again: a moment, and longer each time.

A pure core. What may not live here: dialling (`link.py`), when a client gives up (`cluster/client/retry_policy.py`),
chance.
"""

from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_S: Final = 0.05
MAX_DOUBLINGS: Final = 10
FORGIVEN_S: Final = 60.0
"""A link that has held for so long may have a fault of ours again and be dialled at once."""


@dataclass(slots=True, kw_only=True)
class Backoff:
    """The pauses between the dials of one link."""

    max_pause_s: float
    num_failed: int = 0
    """Dials in a row that came to nothing."""
    num_faults: int = 0
    """Sessions that ended by a fault of ours, none of which had lasted. The replica answers, so dials do not fail."""

    def note_up(self) -> None:
        """The replica has answered."""
        self.num_failed = 0

    def note_fault(self, lasted_s: float) -> None:
        """A session has ended by a fault of ours, after so long. What caused it may well be there again."""
        self.num_faults = 1 if lasted_s >= FORGIVEN_S else self.num_faults + 1

    def note_failure(self) -> None:
        """A dial has come to nothing."""
        self.num_failed += 1

    def pause_s(self, uniform: float) -> float:
        """The pause before the next dial; `uniform` as for `growing_pause_s`."""
        return growing_pause_s(max(self.num_failed, self.num_faults), self.max_pause_s, uniform)


def growing_pause_s(num_doublings: int, max_pause_s: float, uniform: float, hint_s: float = 0.0) -> float:
    """A pause that has doubled so often, up to a limit; not below what the other side has asked for, `hint_s`.

    `uniform` is at random in 0..1 and takes up to half of it away, so that many who have lost the same come one by one.
    """
    longest_s = max(hint_s, min(FIRST_PAUSE_S * 2.0 ** min(num_doublings, MAX_DOUBLINGS), max_pause_s))
    return longest_s * (1 + uniform) / 2
