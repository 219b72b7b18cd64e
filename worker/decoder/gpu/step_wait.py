"""Waiting for a device by looking at its events, with an end: a device that hangs keeps no thread of the host.

What may live here: the loop, its limit and what ends it early. What may not: events of one kind or another
(`buffers.py`), and what a replica does when it has failed (`worker/replica/replica.py`).
"""

import time
from collections.abc import Callable
from typing import Final, Protocol

from holdfast.worker.errors import ReplicaError

_BUSY_S: Final = 0.02
"""For so long a wait looks again at once, as CUDA's own does: a sleep would take longer than what is left of a step."""
_PAUSE_S: Final = 0.0005


class Event(Protocol):
    """Of a device."""

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...


class StepWait:
    """Waits, but not for ever. Any thread may use it; one that waits lets the others run."""

    def __init__(
        self,
        limit_s: float,
        in_vain: Callable[[], str | None] = lambda: None,
        give_up: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`in_vain` tells why nothing good will come any more. `give_up` is called before a wait ends in an error: it
        ends what the device itself waits for.
        """
        self._limit_s = limit_s
        self._in_vain = in_vain
        self._give_up = give_up
        self._clock = clock
        self._pause = pause

    def wait(self, event: Event | None) -> None:
        """Returns when the device has come to the event, or at once without one.

        Raises `ReplicaError` after the limit, or when waiting is in vain: then also if the device has come there, since
        what it has made means nothing.
        """
        if event is not None and not event.query():
            self._look_until(event, self._clock())
        if (reason := self._in_vain()) is not None:
            self._fail(f"a step has failed: {reason}")

    def _look_until(self, event: Event, began_s: float) -> None:
        while not event.query():
            waited_s = self._clock() - began_s
            if waited_s >= self._limit_s:
                self._fail(f"the device has not ended a step within {self._limit_s:g} s")
            if (reason := self._in_vain()) is not None:
                self._fail(f"a step has failed: {reason}")
            self._pause(0.0 if waited_s < _BUSY_S else _PAUSE_S)

    def _fail(self, what: str) -> None:
        self._give_up()
        raise ReplicaError(what)
