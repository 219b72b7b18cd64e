"""Wall clock that does not jump: seconds since 1970 as of its making, counted on by a steady clock.

For stamps that are compared with each other: a step of the system's clock would make a duration of hours of one of
seconds, or a negative one. What only measures time takes the monotonic clock. Both clocks are passed in.
"""

from collections.abc import Callable


class WallClock:
    """Called, it says the seconds since 1970."""

    __slots__ = ("_offset_s", "_steady")

    def __init__(self, now_s: float, steady: Callable[[], float]) -> None:
        """`now_s`: since 1970, as the system has it now. `steady` goes on from any moment, without jumps."""
        self._steady = steady
        self._offset_s = now_s - steady()

    def __call__(self) -> float:
        return self._offset_s + self._steady()
