"""Hysteresis of a tuned setting: it changes on a lasting change of load, and stays constant on a steady one.

What may live here: when requested values are strong enough to change a setting. What may not: where they come from
(`batching_optimizer.py`).
"""

from typing import Final

DEAD_BAND: Final = 1.25
"""A wish within this factor of the value changes nothing: measurements differ by less than this on a steady load.
To go back on the last turn takes the square of it, because what was too much for one may be noise."""
NUM_IN_A_ROW: Final = 3
"""Wishes in a row that must point the same way: a burst is no change of load."""
COOL_DOWN: Final = 4
"""Wishes after a turn that are not listened to: they are still about the time before it, or about going over to it."""


class Hysteresis:
    """An integer between bounds. It goes where the wishes point, in one turn, and no further than the most modest.

    Why it comes to rest: a wish says what the value should be, not by how much it should change, and must not depend on
    the value. So after a turn the wishes of a steady load lie around the value, in the dead band, and nothing changes
    until the load does.
    """

    def __init__(self, value: int, *, low: int, high: int) -> None:
        assert low <= value <= high, f"{value} is not between {low} and {high}"
        self.value = value
        self._low, self._high = low, high
        self.reason = ""
        """Of the wish that it was turned to last."""
        self._wishes: list[tuple[int, str]] = []
        self._last_was_up: bool | None = None
        self._num_deaf = 0

    def wish(self, value: int, reason: str = "") -> bool:
        """Take in what the value should be; whether it was turned."""
        if self._num_deaf:
            self._num_deaf -= 1
            return False
        value = min(self._high, max(self._low, value))
        is_up = value > self.value
        goes_back = self._last_was_up is not None and is_up != self._last_was_up
        band = DEAD_BAND * DEAD_BAND if goes_back else DEAD_BAND
        if self.value / band <= value <= self.value * band:
            self._wishes.clear()
            return False
        if self._wishes and (self._wishes[-1][0] > self.value) != is_up:
            self._wishes.clear()
        self._wishes.append((value, reason))
        if len(self._wishes) < NUM_IN_A_ROW:
            return False
        self.value, self.reason = min(self._wishes, key=lambda wish: abs(wish[0] - self.value))
        self._last_was_up = is_up
        self._wishes.clear()
        self._num_deaf = COOL_DOWN
        return True
