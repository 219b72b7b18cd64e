"""Command queue of a thread: other threads put commands in until it is closed.

What may live here: the queue and its closing. What may not: what the commands do (`engine.py`).
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

from holdfast.worker.errors import HoldfastError

Command: TypeAlias = Callable[[], None]


class Inbox:
    """A queue that is closed once, for a reason. Nothing comes in after that, and what is in stays to be taken."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._closed_by: HoldfastError | None = None

    @property
    def closed_by(self) -> HoldfastError | None:
        """The reason, or None while it is open."""
        return self._closed_by

    @property
    def is_empty(self) -> bool:
        return self._commands.empty()

    def put(self, command: Command) -> None:
        """Raises the reason if the inbox is closed."""
        with self._gate:
            if self._closed_by is not None:
                raise self._closed_by
            self._commands.put(command)

    def put_unless_closed(self, command: Command) -> None:
        with self._gate:
            if self._closed_by is None:
                self._commands.put(command)

    def close(self, reason: HoldfastError) -> bool:
        """Whether this call has closed it: of several, the first one has, and its reason counts."""
        with self._gate:
            if self._closed_by is not None:
                return False
            self._closed_by = reason
            return True

    def wait(self, timeout_s: float) -> Command | None:
        """The next command, or None if none comes in time."""
        try:
            return self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def take_all(self) -> Iterator[Command]:
        """Those that are in, and those that come in meanwhile. For the one thread that takes commands."""
        while not self._commands.empty():
            yield self._commands.get_nowait()
