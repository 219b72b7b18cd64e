"""Pressures: how much of each bounded resource of a router is used, as a fraction of its limit. No IO and no clock.

What may live here: resources, their limits, and the loop's delay as an average over time. What may not: what is done
under pressure (`overload.py`), and measuring (`router/doors/overload_probe.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from holdfast.router.config import OverloadConfig

LOOP_DELAY_AVERAGED_S: Final = 2.0
"""Time constant of the loop's delay: a stall of 1 s counts as 0.4 s, of 2 s as 1.3 s; a lasting delay as itself."""

MOST_DELAY: Final = 2.0
"""The delay counts up to this many times its limit: a process that was stopped for long recovers as fast as others."""


class Resource(StrEnum):
    """What a router can run out of."""

    MEMORY = "memory"
    """Resident memory of the process."""
    LOOP_DELAY = "loop_delay"
    """How late the event loop calls back."""
    BYTES = "bytes"
    """Requests that have arrived and are not decoded, and output that is not read."""
    REQUESTS = "requests"
    """Open requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What was measured at one moment. The loop's delay comes by `LoopDelay.note`."""

    resident_bytes: int = 0
    held_bytes: int = 0
    """Those of the ledger."""
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
    """What is used of each resource: 0 is nothing, 1 is its limit."""
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
