"""Whether the replica at the other end of a link is frozen: it has our work, and makes no progress.

What may live here: the link's news as progress, looked at regularly. What may not: the rule (`worker/progress.py`), and
what follows from a verdict (`link.py`). Gone nodes are found here as well: no news is no progress.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from holdfast.worker.progress import FrozenVerdict

LOOK_EVERY_S: Final = 0.1


class LinkWatch:
    """Of one session of one link. Told of whatever arrives."""

    def __init__(self, has_work: Callable[[], bool], frozen_after_s: float, clock: Callable[[], float]) -> None:
        self._has_work = has_work
        self._verdict = FrozenVerdict(frozen_after_s)
        self._clock = clock
        self._count = 0
        self._last_progress = 0
        self._expected_step_s = 0.0

    def note_step(self) -> None:
        """A step has ended there."""
        self._count += 1

    def note_heartbeat(self, progress: int, expected_step_s: float) -> None:
        """A heartbeat came. It is progress if the replica's own counter has moved."""
        self._count += progress != self._last_progress
        self._last_progress = progress
        self._expected_step_s = expected_step_s

    def look(self) -> bool:
        """One look: whether it is frozen now."""
        return self._verdict.look(
            self._count, has_work=self._has_work(), expected_step_s=self._expected_step_s, now=self._clock()
        )

    async def until_frozen(self) -> float:
        """Returns when it is frozen: the seconds that it made no progress."""
        while not self.look():
            await asyncio.sleep(LOOK_EVERY_S)
        return self._verdict.still_s
