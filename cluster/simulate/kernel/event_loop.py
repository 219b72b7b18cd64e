"""Event loop of a simulated process: runs its callbacks in their order, and each takes the time that it costs."""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from holdfast.cluster.simulate.kernel.timeline import Timeline


class Callback(NamedTuple):
    """Something that a loop is to do."""

    came_s: float
    cost_s: Callable[[], float] | None
    """Asked when its turn comes; None: it costs nothing."""
    action: Callable[..., None]
    args: tuple[Any, ...]


class EventLoop:
    """Of one process. Callbacks that cost nothing run at once, unless one that does is running or it is paused."""

    def __init__(self, owner: object, timeline: Timeline) -> None:
        self._owner = owner
        self._timeline = timeline
        self._waiting: deque[Callback] = deque()
        self._running: Callback | None = None
        self._began_s = self._ran_s = 0.0
        self._num_resets = 0
        self.is_paused = False
        self.wait_s = 0.0
        """How long the callback that runs now, or ran last, waited for others, and took itself."""

    @property
    def ran_s(self) -> float:
        """How long callbacks have run so far, the one that runs now included."""
        return self._ran_s if self._running is None else self._ran_s + self._timeline.now - self._began_s

    @property
    def has_waiting(self) -> bool:
        """Something has come in, and has not had its turn."""
        return bool(self._waiting)

    def undone(self) -> Iterator[Callback]:
        """What has come in and has had no effect yet, the oldest first."""
        if self._running is not None:
            yield self._running
        yield from self._waiting

    def call(self, cost_s: Callable[[], float] | None, action: Callable[..., None], *args: Any) -> None:
        """Runs an action once all that came before it is done. Its effects come after its cost."""
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
        """What has waited happens now, in its order."""
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
