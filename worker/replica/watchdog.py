"""Watchdog of an engine: a thread that watches its progress and reports when it is frozen. The engine cannot block this
thread: it waits for nothing that the engine holds.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from holdfast.worker.progress import FrozenVerdict, ProgressCounter
from holdfast.worker.replica.processes import CoreWait

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.1


class Watchdog:
    """Watches from `start` until `stop`, or until it has called `on_frozen`, which it does once."""

    def __init__(
        self,
        progress: ProgressCounter,
        has_work: Callable[[], bool],
        on_frozen: Callable[[float], None],
        *,
        frozen_after_s: float,
        core_wait: CoreWait | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_frozen` is called with the seconds without progress, on the watchdog's thread. `core_wait` is of the
        processes that do the work: while they have no core, standing still is not their fault.
        """
        self._progress = progress
        self._has_work = has_work
        self._on_frozen = on_frozen
        self._verdict = FrozenVerdict(frozen_after_s)
        self._core_wait = core_wait
        self._looked: tuple[int, float] | None = None
        """Count and time of the last look, if there was work."""
        self._clock = clock
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """`on_frozen` is not called any more, unless the call is just about to be made."""
        self._stopped.set()

    def look(self) -> bool:
        """One look: whether the engine is frozen now."""
        progress, has_work, now = self._progress, self._has_work(), self._clock()
        count = progress.count
        self._note_starvation(count, now, has_work=has_work)
        return self._verdict.look(
            count,
            has_work=has_work,
            expected_gap_s=progress.expected_gap_s,
            now=now,
            starved_s=progress.starved_s,
        )

    def _note_starvation(self, count: int, now: float, *, has_work: bool) -> None:
        """Reads times of threads only while the count stands still: that takes a millisecond."""
        if self._core_wait is not None:
            if has_work and self._looked is not None and count == self._looked[0]:
                self._progress.starved_s += self._core_wait.since_last(max(0.0, now - self._looked[1]))
            else:
                self._core_wait.forget()
        self._looked = (count, now) if has_work else None

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_EVERY_S):
            if self.look():
                logger.error("no progress for %.1f s while there is work", self._verdict.still_s)
                self._on_frozen(self._verdict.still_s)
                return
