"""Hysteresis of a tuned setting: it changes on a lasting change of load, and stays constant on a steady one.

What may live here: when requested values are strong enough to change a setting. What may not: where they come from
(`batching_optimizer.py`).
"""

from typing import Final

DEAD_BAND: Final = 1.25
"""A proposal within this factor of the value changes nothing: measurements differ by less than this on a steady load.
To go back on the last turn takes the square of it, because what was too much for one may be noise."""
NUM_IN_A_ROW: Final = 3
"""Proposals in a row that must point the same way: a burst is no change of load."""
COOL_DOWN: Final = 4
"""Proposals after a change that are ignored: they are still about the time before it, or about going over to it."""


class Hysteresis:
    """An integer between bounds. It goes where the proposals point, in one change, and no further than the most modest.

    It comes to rest, because a proposal says what the value should be, not by how much it should change, and must not
    depend on the value. After a change the proposals of a steady load lie in the dead band around the value, and
    nothing changes until the load does.
    """

    def __init__(self, value: int, *, low: int, high: int) -> None:
        assert low <= value <= high, f"{value} is not between {low} and {high}"
        self.value = value
        self._low, self._high = low, high
        self.reason = ""
        """Of the proposal that it was last set to."""
        self._proposals: list[tuple[int, str]] = []
        self._last_was_up: bool | None = None
        self._num_ignored = 0

    def propose(self, value: int, reason: str = "") -> bool:
        """Takes in what the value should be. Returns whether it was changed."""
        if self._num_ignored:
            self._num_ignored -= 1
            return False
        value = min(self._high, max(self._low, value))
        is_up = value > self.value
        goes_back = self._last_was_up is not None and is_up != self._last_was_up
        band = DEAD_BAND * DEAD_BAND if goes_back else DEAD_BAND
        if self.value / band <= value <= self.value * band:
            self._proposals.clear()
            return False
        if self._proposals and (self._proposals[-1][0] > self.value) != is_up:
            self._proposals.clear()
        self._proposals.append((value, reason))
        if len(self._proposals) < NUM_IN_A_ROW:
            return False
        self.value, self.reason = min(self._proposals, key=lambda proposal: abs(proposal[0] - self.value))
        self._last_was_up = is_up
        self._proposals.clear()
        self._num_ignored = COOL_DOWN
        return True
