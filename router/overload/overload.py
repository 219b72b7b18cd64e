"""Overload manager of a router: which protective actions are on, by the pressures of its resources. A core without IO.

    overload = Overload(OverloadConfig(), ByteLedger(OverloadConfig()), max_memory=2**32)
    overload.note_loop(now, next_s)             # whenever the probe's timer fires, and in how long it is to fire again
    overload.observe(Readings(...), now)        # as often as memory and open requests are measured
    overload.check_new(priority, is_resumed=False, now=now)     # before each request; raises `OverloadedError`
    overload.takes_connection()                 # before each connection; False: health, operators, resumed streams only
    overload.must_close(now)                    # True: end `ledger.greediest()`, with the error of `note_closed`

Each action begins at its own pressure and ends `release_margin` below it. The order is: give free memory back to the
system, stop accepting connections, shed new LOW requests, shed all new ones, close the greediest, shed resumed streams.
Health and operators' calls are never refused. All calls take the time in seconds of one clock. `OverloadWatch` decides
when a router measures its use, and the actions that follow.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from holdfast.router.config import OverloadConfig
from holdfast.router.overload.byte_ledger import ByteLedger, Lease
from holdfast.worker.errors import ByteBudgetError, OverloadedError
from holdfast.worker.request import Priority

LOOP_DELAY_AVERAGED_S: Final = 2.0
"""Time constant of the loop's delay: a stall of 1 s counts as 0.4 s, of 2 s as 1.3 s; a lasting delay as itself."""

MAX_DELAY: Final = 2.0
"""The delay counts up to this many times its limit: a process that was stopped for long recovers as fast as others."""


class Resource(StrEnum):
    """Resources that a router can run out of."""

    MEMORY = "memory"
    """Resident memory of the process."""
    LOOP_DELAY = "loop_delay"
    """Delay of the event loop's callbacks."""
    BYTES = "bytes"
    """Requests that have arrived and are not decoded, and output that is not read."""
    REQUESTS = "requests"
    """Open requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Measurements at one moment. The loop's delay comes by `LoopDelay.note`."""

    resident_bytes: int = 0
    held_bytes: int = 0
    """Bytes in the ledger."""
    num_open: int = 0


class LoopDelay:
    """The delay of an event loop, in seconds: a time-weighted average of how late one repeated timer is."""

    def __init__(self, most_s: float) -> None:
        """The average never exceeds `most_s`."""
        self._most_s = most_s
        self._average_s = 0.0
        self._noted_at: float | None = None
        self._next_s = 0.0

    def note(self, now: float, next_s: float) -> None:
        """The timer has fired; the next time it is to fire in `next_s`."""
        self._average_s = self.at(now)
        self._noted_at, self._next_s = now, next_s

    def at(self, now: float) -> float:
        """The average as it would be if the timer fired now: a stall counts from when it is noticed by anyone."""
        if self._noted_at is None:
            return 0.0
        elapsed_s = max(0.0, now - self._noted_at)
        late_s = max(0.0, elapsed_s - self._next_s)
        weight = math.exp(-elapsed_s / LOOP_DELAY_AVERAGED_S)
        return min(self._most_s, late_s + (self._average_s - late_s) * weight)


def pressures(
    config: OverloadConfig, max_memory: int, readings: Readings, loop_delay_s: float
) -> dict[Resource, float]:
    """Share of each resource in use: 0 is nothing, 1 is its limit."""
    return {
        Resource.MEMORY: readings.resident_bytes / max_memory,
        Resource.LOOP_DELAY: loop_delay_s / config.max_loop_delay_s,
        Resource.BYTES: readings.held_bytes / config.max_router_bytes,
        Resource.REQUESTS: readings.num_open / config.max_open_requests,
    }


def highest(of: Mapping[Resource, float], resources: frozenset[Resource]) -> tuple[Resource, float]:
    """The resource with the highest pressure among some, and its pressure."""
    name = max(sorted(resources), key=lambda one: of.get(one, 0.0))
    return name, of.get(name, 0.0)


RETRY_S: Final = 2.0
"""When a refused request may come again."""

CLOSE_EVERY_S: Final = 0.5
"""Seconds between two requests that are ended: the memory of the first must be measured as freed before the next."""


class OverloadAction(StrEnum):
    """Actions under pressure, in the order in which they begin."""

    SHRINK_HEAP = "shrink_heap"
    STOP_ACCEPTING = "stop_accepting"
    SHED_LOW = "shed_low"
    SHED_NEW = "shed_new"
    CLOSE_GREEDIEST = "close_greediest"
    SHED_RESUMED = "shed_resumed"


_ALL: Final = frozenset(Resource)
_CAUSES: Final[Mapping[OverloadAction, frozenset[Resource]]] = {
    OverloadAction.SHRINK_HEAP: frozenset({Resource.MEMORY}),
    OverloadAction.STOP_ACCEPTING: _ALL,
    OverloadAction.SHED_LOW: _ALL,
    OverloadAction.SHED_NEW: _ALL,
    OverloadAction.CLOSE_GREEDIEST: frozenset({Resource.MEMORY, Resource.BYTES}),
    OverloadAction.SHED_RESUMED: _ALL,
}
"""The resources that an action helps."""


class Overload:
    """Overload manager of one router, on one event loop."""

    def __init__(self, config: OverloadConfig, ledger: ByteLedger, max_memory: int) -> None:
        """`max_memory`: resident bytes at which memory's pressure is 1."""
        self.ledger = ledger
        self._config = config
        self._max_memory = max_memory
        self._starts = {
            OverloadAction.SHRINK_HEAP: config.shrink_heap_at,
            OverloadAction.STOP_ACCEPTING: config.stop_accepting_at,
            OverloadAction.SHED_LOW: config.shed_low_at,
            OverloadAction.SHED_NEW: config.shed_new_at,
            OverloadAction.CLOSE_GREEDIEST: config.close_greediest_at,
            OverloadAction.SHED_RESUMED: 1.0,
        }
        self._first_start = min(self._starts.values())
        self._loop_delay = LoopDelay(MAX_DELAY * config.max_loop_delay_s)
        self._readings = Readings()
        self._closed_at: float | None = None
        self.pressures: dict[Resource, float] = dict.fromkeys(Resource, 0.0)
        """Pressures as last observed."""
        self.active: dict[OverloadAction, Resource] = {}
        """The actions that are on, in order, each with the resource under the most pressure."""
        self.counts: Counter[OverloadAction] = Counter()
        """Since the start: connections and requests refused, requests ended, heaps shrunk."""

    # --- measurements ---

    def note_loop(self, now: float, next_s: float) -> None:
        """The probe's timer has fired, and is to fire again in `next_s`."""
        self._loop_delay.note(now, next_s)

    def observe(self, readings: Readings, now: float) -> None:
        """Takes measurements; begins and ends actions."""
        self._readings = readings
        self._update(now)

    def _update(self, now: float) -> None:
        self.pressures = pressures(self._config, self._max_memory, self._readings, self._loop_delay.at(now))
        if not self.active and max(self.pressures.values()) < self._first_start:
            return
        active: dict[OverloadAction, Resource] = {}
        for action, start in self._starts.items():
            resource, pressure = highest(self.pressures, _CAUSES[action])
            margin = self._config.release_margin if action in self.active else 0.0
            if pressure >= start - margin:
                active[action] = resource
        self.active = active

    # --- checks before work begins ---

    def takes_connection(self) -> bool:
        """Whether a new connection may send new requests. If not: health, operators, resumed streams."""
        return OverloadAction.STOP_ACCEPTING not in self.active

    def refuse_connection(self) -> OverloadedError:
        """Counts a connection, or a request on a guest's, that is refused."""
        return self._refused(OverloadAction.STOP_ACCEPTING, "it takes no new connections")

    def check_new(self, priority: Priority, *, is_resumed: bool, now: float, is_guest: bool = False) -> None:
        """Raises `OverloadedError` for a request that must be shed now. A resumed one goes on after output; a guest's
        has come on a connection that was made while none was taken.
        """
        self._update(now)  # the loop may have stalled since the last probe
        if is_resumed:
            if OverloadAction.SHED_RESUMED in self.active:
                raise self._refused(OverloadAction.SHED_RESUMED, "it takes no requests, not even resumed ones")
        elif OverloadAction.SHED_NEW in self.active:
            raise self._refused(OverloadAction.SHED_NEW, "it takes no new requests")
        elif is_guest and OverloadAction.STOP_ACCEPTING in self.active:
            raise self.refuse_connection()
        elif priority is Priority.LOW and OverloadAction.SHED_LOW in self.active:
            raise self._refused(OverloadAction.SHED_LOW, "it takes no new requests of priority LOW")

    # --- actions ---

    def must_close(self, now: float) -> bool:
        """Whether to end the greediest request now: at most once in `CLOSE_EVERY_S`."""
        is_due = self._closed_at is None or now - self._closed_at >= CLOSE_EVERY_S
        return OverloadAction.CLOSE_GREEDIEST in self.active and is_due

    def note_closed(self, held_bytes: int, now: float) -> ByteBudgetError:
        """Counts a request that is ended for the bytes that it holds. Returns the error for its client."""
        self._closed_at = now
        self.counts[OverloadAction.CLOSE_GREEDIEST] += 1
        message = f"this request was ended: it held {held_bytes} bytes, the most of the caller that holds the most"
        return ByteBudgetError(f"{self._used(OverloadAction.CLOSE_GREEDIEST)}: {message}", RETRY_S)

    def note_shrunk(self) -> None:
        """Free memory was given back to the system."""
        self.counts[OverloadAction.SHRINK_HEAP] += 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for people. Empty while no request or connection would be refused."""
        refusing = [action for action in self.active if action is not OverloadAction.SHRINK_HEAP]
        if not refusing:
            return ()
        used = ", ".join(f"{name} {pressure:.0%}" for name, pressure in self.pressures.items())
        return (f"this router is overloaded ({used} of their limits): {', '.join(refusing)}",)

    def _refused(self, action: OverloadAction, message: str) -> OverloadedError:
        self.counts[action] += 1
        return OverloadedError(f"{self._used(action)}: {message}", RETRY_S)

    def _used(self, action: OverloadAction) -> str:
        resource = self.active.get(action, Resource.MEMORY)
        used = f"{resource} {self.pressures[resource]:.0%} of {_LIMITS[resource]}"
        return f"this router is overloaded ({used}; {_STARTS[action]})"


_LIMITS: Final[Mapping[Resource, str]] = {
    Resource.MEMORY: "overload.max_memory",
    Resource.LOOP_DELAY: "overload.max_loop_delay_s",
    Resource.BYTES: "overload.max_router_bytes",
    Resource.REQUESTS: "overload.max_open_requests",
}
_STARTS: Final[Mapping[OverloadAction, str]] = {
    OverloadAction.STOP_ACCEPTING: "overload.stop_accepting_at",
    OverloadAction.SHED_LOW: "overload.shed_low_at",
    OverloadAction.SHED_NEW: "overload.shed_new_at",
    OverloadAction.CLOSE_GREEDIEST: "overload.close_greediest_at",
    OverloadAction.SHED_RESUMED: "at its limit",
}


BUSY_S: Final = 0.25
"""Between two looks while anything is open or any action is on."""

IDLE_S: Final = 2.0

SHRINK_EVERY_S: Final = 5.0


class OverloadWatch:
    """Watch of one router, on its event loop."""

    def __init__(self, overload: Overload, on_closing: Callable[[Lease], None] = lambda lease: None) -> None:
        """`on_closing` is called with each request before it is ended for the memory that it holds."""
        self._overload = overload
        self._on_closing = on_closing
        self._shrunk_at: float | None = None

    def begin(self, now: float, num_open: int) -> float:
        """Sets the timer: returns the seconds until it fires."""
        overload = self._overload
        is_busy = bool(num_open or overload.ledger.num_leases or overload.active)
        wait_s = BUSY_S if is_busy else IDLE_S
        overload.note_loop(now, wait_s)
        return wait_s

    def look(self, now: float, resident_bytes: int, num_open: int) -> bool:
        """The timer has fired. Ends the greediest request if due; returns whether to shrink the heap."""
        overload = self._overload
        readings = Readings(resident_bytes=resident_bytes, held_bytes=overload.ledger.held_bytes, num_open=num_open)
        overload.observe(readings, now)
        if overload.must_close(now) and (lease := overload.ledger.greediest()) is not None:
            self._on_closing(lease)
            lease.end(overload.note_closed(lease.held_bytes, now))
        is_due = self._shrunk_at is None or now - self._shrunk_at >= SHRINK_EVERY_S
        if OverloadAction.SHRINK_HEAP not in overload.active or not is_due:
            return False
        self._shrunk_at = now
        return True
