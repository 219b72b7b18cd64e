"""How long a replica is left alone before it is dialled again: a moment, and longer each time that it does not answer.

A pure core. What may not live here: dialling (`link.py`), chance.
"""

from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_S: Final = 0.05
MAX_DOUBLINGS: Final = 10


@dataclass(slots=True, kw_only=True)
class Redial:
    """The pauses between the dials of one link."""

    max_pause_s: float
    num_failed: int = 0
    """Dials in a row that came to nothing."""

    def note_up(self) -> None:
        """The replica has answered."""
        self.num_failed = 0

    def note_failure(self) -> None:
        """A dial has come to nothing."""
        self.num_failed += 1

    def pause_s(self, draw: float) -> float:
        """The pause before the next dial. `draw` is by chance, in 0..1, so that routers come one by one."""
        longest_s = min(FIRST_PAUSE_S * 2.0 ** min(self.num_failed, MAX_DOUBLINGS), self.max_pause_s)
        return longest_s * (1 + draw) / 2
