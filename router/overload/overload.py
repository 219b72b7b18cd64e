"""Overload manager of a router: which protective actions are on, by the pressures of its resources. A core without IO.

    overload = Overload(OverloadConfig(), ByteLedger(OverloadConfig()), max_memory=2**32)
    overload.note_loop(now, next_s)             # whenever the probe's timer fires, and in how long it is to fire again
    overload.observe(Readings(...), now)        # as often as memory and open requests are measured
    overload.check_new(priority, is_resumed=False, now=now)     # before each request; raises `OverloadedError`
    overload.takes_connection()                 # before each connection; False: health, operators, resumed streams only
    overload.must_close(now)                    # True: end `ledger.greediest()`, with the error of `note_closed`

Each action begins at its own pressure and ends `release_margin` below it. The order is: give free memory back to the
system, stop accepting connections, shed new LOW requests, shed all new ones, close the greediest, shed resumed streams.
Health and operators' calls are never refused. All calls take the time in seconds of one clock. What may not live here:
measuring, clocks, connections (`router/doors/`).
"""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from holdfast.router.config import OverloadConfig
from holdfast.router.overload.byte_ledger import ByteLedger
from holdfast.router.overload.pressure import MOST_DELAY, LoopDelay, Readings, Resource, highest, pressures
from holdfast.worker.errors import ByteBudgetError, OverloadedError
from holdfast.worker.request import Priority

RETRY_S: Final = 2.0
"""When a refused request may come again."""

CLOSE_EVERY_S: Final = 0.5
"""Between two requests that are ended: what one has held must be measured as gone first."""


class OverloadAction(StrEnum):
    """What is done under pressure, in the order in which it begins."""

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
    """Of one router, on one event loop."""

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
        self._loop_delay = LoopDelay(MOST_DELAY * config.max_loop_delay_s)
        self._readings = Readings()
        self._closed_at: float | None = None
        self.pressures: dict[Resource, float] = dict.fromkeys(Resource, 0.0)
        """As last observed."""
        self.active: dict[OverloadAction, Resource] = {}
        """The actions that are on, in order, each with the resource under the most pressure."""
        self.counts: Counter[OverloadAction] = Counter()
        """Since the start: connections and requests refused, requests ended, heaps shrunk."""

    # --- what is measured ---

    def note_loop(self, now: float, next_s: float) -> None:
        """The probe's timer has fired, and is to fire again in `next_s`."""
        self._loop_delay.note(now, next_s)

    def observe(self, readings: Readings, now: float) -> None:
        """Takes what was measured; begins and ends actions."""
        self._readings = readings
        self._update(now)

    def _update(self, now: float) -> None:
        self.pressures = pressures(self._config, self._max_memory, self._readings, self._loop_delay.at(now))
        active: dict[OverloadAction, Resource] = {}
        for action, start in self._starts.items():
            resource, pressure = highest(self.pressures, _CAUSES[action])
            margin = self._config.release_margin if action in self.active else 0.0
            if pressure >= start - margin:
                active[action] = resource
        self.active = active

    # --- what is asked before work begins ---

    def takes_connection(self) -> bool:
        """Whether a new connection may send new requests. If not: health, operators, resumed streams."""
        return OverloadAction.STOP_ACCEPTING not in self.active

    def refuse_connection(self) -> OverloadedError:
        """Counts a connection, or a request on a guest's, that is refused."""
        return self._refused(OverloadAction.STOP_ACCEPTING, "it takes no new connections")

    def check_new(self, priority: Priority, *, is_resumed: bool, now: float, is_guest: bool = False) -> None:
        """Raises `OverloadedError` for a request that is to be shed now. A resumed one goes on after output; a guest's
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

    # --- what is to be done ---

    def must_close(self, now: float) -> bool:
        """Whether the greediest request is to be ended now: not more often than every `CLOSE_EVERY_S`."""
        is_due = self._closed_at is None or now - self._closed_at >= CLOSE_EVERY_S
        return OverloadAction.CLOSE_GREEDIEST in self.active and is_due

    def note_closed(self, held_bytes: int, now: float) -> ByteBudgetError:
        """Counts a request that is ended for the bytes that it holds. Returns the error for its client."""
        self._closed_at = now
        self.counts[OverloadAction.CLOSE_GREEDIEST] += 1
        told = f"this request held the most bytes, {held_bytes}, of the caller who holds the most; it was ended"
        return ByteBudgetError(f"{self._used(OverloadAction.CLOSE_GREEDIEST)}: {told}", RETRY_S)

    def note_shrunk(self) -> None:
        """Free memory was given back to the system."""
        self.counts[OverloadAction.SHRINK_HEAP] += 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong, for people. Empty while no request or connection would be refused."""
        refusing = [action for action in self.active if action is not OverloadAction.SHRINK_HEAP]
        if not refusing:
            return ()
        used = ", ".join(f"{name} {pressure:.0%}" for name, pressure in self.pressures.items())
        return (f"this router is overloaded ({used} of their limits): {', '.join(refusing)}",)

    def _refused(self, action: OverloadAction, told: str) -> OverloadedError:
        self.counts[action] += 1
        return OverloadedError(f"{self._used(action)}: {told}", RETRY_S)

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
