"""Whether the replica at the other end of a link is frozen: it has our work, and makes no progress.

What may live here: the link's news as progress, looked at regularly, and how long silence may last. What may not: the
rule for a counter that stands still (`worker/progress.py`), and what follows from a verdict (`link.py`). Gone nodes are
found here as well: no news is no progress.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from holdfast.worker.progress import FrozenVerdict

LOOK_EVERY_S: Final = 0.1

NUM_HEARTBEATS_MISSED: Final = 8
"""A replica with our work that has been silent for as long as so many heartbeats take is frozen, whatever its steps
take: heartbeats do not wait for steps. The allowance for long steps is for those that are heard of."""


class LinkWatch:
    """Of one session of one link. Told of whatever arrives."""

    def __init__(
        self, has_work: Callable[[], bool], frozen_after_s: float, heartbeat_s: float, clock: Callable[[], float]
    ) -> None:
        """`heartbeat_s` is the time between two heartbeats of the replica."""
        self._has_work = has_work
        self._progress = FrozenVerdict(frozen_after_s)
        self._news = FrozenVerdict(max(frozen_after_s, NUM_HEARTBEATS_MISSED * heartbeat_s))
        self._clock = clock
        self._count = 0
        self._num_news = 0
        self._last_progress = 0
        self._expected_step_s = 0.0

    def note_step(self) -> None:
        """A step has ended there."""
        self._count += 1
        self._num_news += 1

    def note_heartbeat(self, progress: int, expected_step_s: float) -> None:
        """A heartbeat came. It is progress if the replica's own counter has moved."""
        self._count += progress != self._last_progress
        self._num_news += 1
        self._last_progress = progress
        self._expected_step_s = expected_step_s

    def look(self) -> bool:
        """One look: whether it is frozen now."""
        has_work, now = self._has_work(), self._clock()
        is_silent = self._news.look(self._num_news, has_work=has_work, expected_step_s=0.0, now=now)
        stands_still = self._progress.look(
            self._count, has_work=has_work, expected_step_s=self._expected_step_s, now=now
        )
        return is_silent or stands_still

    async def until_frozen(self) -> float:
        """Returns when it is frozen: the seconds that it made no progress."""
        while not self.look():
            await asyncio.sleep(LOOK_EVERY_S)
        return self._progress.still_s
