"""Watchdog of an engine: a thread that watches its progress and reports when it is frozen.

What may live here: looking, at regular times. What may not: the rule (`worker/progress.py`), and what happens then
(`worker/replica/replica.py`). The engine cannot block this thread: it waits for nothing that the engine holds.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from holdfast.worker.progress import FrozenVerdict, ProgressCounter

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_frozen` is called with the seconds without progress, on the watchdog's thread."""
        self._progress = progress
        self._has_work = has_work
        self._on_frozen = on_frozen
        self._verdict = FrozenVerdict(frozen_after_s)
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
        progress = self._progress
        return self._verdict.look(
            progress.count,
            has_work=self._has_work(),
            expected_gap_s=progress.expected_gap_s,
            now=self._clock(),
        )

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_EVERY_S):
            if self.look():
                logger.error("no progress for %.1f s while there is work", self._verdict.still_s)
                self._on_frozen(self._verdict.still_s)
                return
