"""Inbox and output queues of an engine: commands from any thread for the one that runs the steps, and unsent updates of
each listener.
"""

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

from holdfast.worker.cache.prefix_cache import CacheFeed
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import EngineLoad, TokenDelta
from holdfast.worker.step_update import NO_CHANGES, EngineStats, FetchedAhead, Rejection, StepUpdate

Command: TypeAlias = Callable[[], None]


class Inbox:
    """A queue that is closed once, for a reason. No further commands are accepted; the accepted ones remain."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self.closed_by: HoldfastError | None = None
        """The reason, or None while it is open. To be read only."""

    @property
    def is_empty(self) -> bool:
        return self._commands.empty()

    def put(self, command: Command) -> None:
        """Raises the reason if the inbox is closed."""
        with self._gate:
            if self.closed_by is not None:
                raise self.closed_by
            self._commands.put(command)

    def put_unless_closed(self, command: Command) -> None:
        """Puts a command in, or drops it if the inbox is closed."""
        with self._gate:
            if self.closed_by is None:
                self._commands.put(command)

    def close(self, reason: HoldfastError) -> bool:
        """Whether this call has closed it: of several, the first one has, and its reason counts."""
        with self._gate:
            if self.closed_by is not None:
                return False
            self.closed_by = reason
            return True

    def take(self, wait_s: float = 0.0) -> list[Command]:
        """All commands that are in. Waits at most so long for the first. For the one thread that takes commands."""
        commands: list[Command] = []
        try:
            if wait_s > 0:
                commands.append(self._commands.get(timeout=wait_s))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands


class OutputQueue:
    """Deltas, rejections and prefix-cache changes not yet sent to one listener."""

    def __init__(self) -> None:
        self.is_new = True
        self.deltas: list[TokenDelta] = []
        self.rejections: list[Rejection] = []
        self.fetched_ahead: list[FetchedAhead] = []
        self.cache: CacheFeed | None = None

    @property
    def has_news(self) -> bool:
        """Whether there is anything that the listener has not been sent."""
        outcomes = self.deltas or self.rejections or self.fetched_ahead
        return bool(self.is_new or outcomes or (self.cache and self.cache.has_news))

    def take(self, step_id: int, load: EngineLoad, stats: EngineStats | None) -> StepUpdate:
        """The update to send now; its content is not sent again."""
        update = StepUpdate(
            step_id=step_id,
            deltas=tuple(self.deltas),
            rejections=tuple(self.rejections),
            load=load,
            cache=self.cache.take() if self.cache else NO_CHANGES,
            fetched_ahead=tuple(self.fetched_ahead),
            stats=stats,
        )
        self.is_new, self.deltas, self.rejections, self.fetched_ahead = False, [], [], []
        return update
