"""Failure detector of one link: whether the replica is frozen, that is, has work of this router and makes no progress.

Steps and heartbeats count as progress; lost nodes are detected too, by their silence. What may not live here: the rule
for a counter that stands still (`worker/progress.py`), and what follows from a verdict (`router/links/link.py`).
"""

import asyncio
from collections.abc import Callable
from typing import Final

from holdfast.worker.progress import FrozenVerdict
from holdfast.worker.step_update import Heartbeat

LOOK_EVERY_S: Final = 0.1

NUM_HEARTBEATS_MISSED: Final = 8
"""A replica with work that misses this many heartbeats is frozen, however long its steps: heartbeats do not wait for
steps. The allowance for long steps holds only while heartbeats arrive."""


class LinkWatch:
    """Watches one session of one link. The link reports every message to it."""

    def __init__(
        self, has_work: Callable[[], bool], frozen_after_s: float, heartbeat_s: float, clock: Callable[[], float]
    ) -> None:
        """`heartbeat_s` is the time between two heartbeats of the replica."""
        self._has_work = has_work
        self._progress = FrozenVerdict(frozen_after_s)
        self._silence = FrozenVerdict(max(frozen_after_s, NUM_HEARTBEATS_MISSED * heartbeat_s))
        self._clock = clock
        self._work_came = asyncio.Event()
        self._count = 0
        self._num_messages = 0
        self._last_heartbeat = Heartbeat(progress=0, expected_gap_s=0.0)

    def note_work(self) -> None:
        """A request was sent to the replica."""
        self._work_came.set()

    def note_step(self) -> None:
        """A step update arrived."""
        self._count += 1
        self._num_messages += 1

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        """A heartbeat arrived. It is progress if the replica's own counter has moved."""
        self._count += heartbeat.progress != self._last_heartbeat.progress
        self._num_messages += 1
        self._last_heartbeat = heartbeat

    def look(self) -> bool:
        """Whether the replica is frozen now. To be called regularly."""
        has_work, now = self._has_work(), self._clock()
        is_silent = self._silence.look(self._num_messages, has_work=has_work, expected_gap_s=0.0, now=now)
        last = self._last_heartbeat
        stands_still = self._progress.look(
            self._count, has_work=has_work, expected_gap_s=last.expected_gap_s, now=now, starved_s=last.starved_s
        )
        return is_silent or stands_still

    async def until_frozen(self) -> float:
        """Waits until the replica is frozen. Returns the seconds without progress. Looks only while there is work."""
        while not self.look():
            self._work_came.clear()
            if not self._has_work():
                await self._work_came.wait()
            await asyncio.sleep(LOOK_EVERY_S)
        return self._progress.still_s
