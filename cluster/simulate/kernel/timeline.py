"""Discrete-event clock of the simulator: a heap of scheduled calls, and a time that jumps from one to the next.

Two runs that schedule the same calls run them in the same order; `digest` tells whether they did. What may not live
here: what the events are.
"""

import heapq
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any
from zlib import crc32

Action = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happens now."""

    number: int
    """Counted from 1: a run with the same seed has the same event under the same number."""
    time_s: float
    action: Action
    args: tuple[Any, ...]


class Timeline:
    """Events in order of time; of those at the same time, the one scheduled first comes first."""

    def __init__(self, watch: Callable[[Event], None] | None = None) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.num_events = 0
        """Events so far, the one that is running included."""
        self.digest = 0
        """Of the times and names of all events so far."""
        self._watch = watch
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._num_scheduled = 0

    def at(self, time_s: float, action: Action, *args: Any) -> None:
        """Schedules a call. A time that has passed is now."""
        self._num_scheduled += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._num_scheduled, action, args))

    def after(self, delay_s: float, action: Action, *args: Any) -> None:
        self.at(self.now + delay_s, action, *args)

    @property
    def next_s(self) -> float:
        """When the next event is due; never, if there is none."""
        return self._heap[0][0] if self._heap else inf

    def step(self) -> bool:
        """Runs the next event. False: there is none."""
        if not self._heap:
            return False
        self.now, _, action, args = heapq.heappop(self._heap)
        self.num_events += 1
        self.digest = crc32(struct.pack("<d", self.now) + action.__name__.encode(), self.digest)
        if self._watch is not None:
            self._watch(Event(number=self.num_events, time_s=self.now, action=action, args=args))
        action(*args)
        return True


class Violation(Exception):
    """An invariant does not hold. The message says which, and what was found."""


def require(holds: bool, promise: str) -> None:
    """Raises `Violation` unless the promise holds."""
    if not holds:
        raise Violation(promise)
