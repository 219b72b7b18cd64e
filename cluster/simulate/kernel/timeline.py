"""Discrete-event clock of the simulator: a heap of scheduled calls, and a time that jumps from one to the next; and the
event loop of a simulated process, which runs its callbacks in their order, each for the time that it costs.

Two runs that schedule the same calls run them in the same order; `digest` tells whether they did.
"""

import heapq
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple
from zlib import crc32

Action = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event at the current time."""

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
        """Events so far, including the current one."""
        self.digest = 0
        """Digest of the times and names of all events so far."""
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
        """Time of the next event; infinity if there is none."""
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
    """An invariant does not hold. The message names the promise and the observation."""


def require(holds: bool, promise: str) -> None:
    """Raises `Violation` unless the promise holds."""
    if not holds:
        raise Violation(promise)


class Callback(NamedTuple):
    """A callback for a loop to run."""

    came_s: float
    cost_s: Callable[[], float] | None
    """Called when its turn comes; None: it costs nothing."""
    action: Callable[..., None]
    args: tuple[Any, ...]


class EventLoop:
    """Event loop of one process. Callbacks without a cost run at once, unless a callback with a cost is running or the
    loop is paused.
    """

    def __init__(self, owner: object, timeline: Timeline) -> None:
        self._owner = owner
        self._timeline = timeline
        self._waiting: deque[Callback] = deque()
        self._running: Callback | None = None
        self._began_s = self._ran_s = 0.0
        self._num_resets = 0
        self.is_paused = False
        self.wait_s = 0.0
        """Seconds that the callback that runs now, or ran last, waited for others and ran itself."""

    @property
    def ran_s(self) -> float:
        """Seconds that callbacks have run so far, including the current one."""
        return self._ran_s if self._running is None else self._ran_s + self._timeline.now - self._began_s

    @property
    def has_waiting(self) -> bool:
        """Whether something has come in that has not had its turn."""
        return bool(self._waiting)

    def undone(self) -> Iterator[Callback]:
        """Arrivals that have had no effect yet, the oldest first."""
        if self._running is not None:
            yield self._running
        yield from self._waiting

    def call(self, cost_s: Callable[[], float] | None, action: Callable[..., None], *args: Any) -> None:
        """Runs an action after all earlier callbacks. Its effects come after its cost."""
        callback = Callback(self._timeline.now, cost_s, action, args)
        if self.is_paused or self._running is not None or self._waiting:
            self._waiting.append(callback)
        else:
            self._begin(callback)

    def go_on(self, cost_s: float, action: Callable[[], None]) -> None:
        """The callback that runs now takes so much more time, and does something more after it."""
        assert self._running is None, "it has had its effect already"
        self._begin(Callback(self._timeline.now, lambda: cost_s, action, ()))

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        """Runs all delayed callbacks, in order."""
        self.is_paused = False
        self._drain()

    def reset(self) -> None:
        """The process has ended: nothing that waits, or runs, has any effect."""
        self._waiting.clear()
        self._ran_s, self._running = self.ran_s, None
        self.is_paused = False
        self._num_resets += 1

    def __str__(self) -> str:
        return f"{self._owner}, loop:"

    def _begin(self, callback: Callback) -> None:
        cost_s = 0.0 if callback.cost_s is None else callback.cost_s()
        if not cost_s:
            self._finish(callback)
            return
        self._running, self._began_s = callback, self._timeline.now
        self._timeline.at(self._timeline.now + cost_s, self._end, self._num_resets, callback)

    def _end(self, reset: int, callback: Callback) -> None:
        if reset != self._num_resets:
            return
        self._ran_s, self._running = self.ran_s, None
        if self.is_paused:
            self._waiting.appendleft(callback._replace(cost_s=None))
        else:
            self._finish(callback)
            self._drain()

    def _finish(self, callback: Callback) -> None:
        self.wait_s = self._timeline.now - callback.came_s
        callback.action(*callback.args)

    def _drain(self) -> None:
        while self._waiting and self._running is None and not self.is_paused:
            self._begin(self._waiting.popleft())


class ThreadPool:
    """When each of its threads is free again."""

    def __init__(self, num_threads: int) -> None:
        self._free_s = [0.0] * num_threads

    def done_s(self, now: float, cost_s: float) -> float:
        """When a job that comes now is done: it begins once a thread is free."""
        done_s = max(now, self._free_s[0]) + cost_s
        heapq.heapreplace(self._free_s, done_s)
        return done_s
