"""Probe loop: a thread that calls a probe at regular times. The engine's watchdog is a probe loop that reports when
progress stops: it takes no lock that the engine holds, so the engine cannot block it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.worker.progress import FrozenVerdict, ProgressCounter
from holdfast.worker.replica.processes import CoreWait

logger = logging.getLogger(__name__)

JOIN_S: Final = 5.0
"""Seconds that a stop waits for a look: one takes milliseconds, and may wait for a core on a busy machine."""


class ProbeLoop:
    """One probe on a separate thread, so that a waiting probe holds up no other. A look that fails is logged."""

    def __init__(self, name: str, every_s: float, look: Callable[[], object], *, at_once: bool = True) -> None:
        """Calls `look` every `every_s` seconds from `start` until `stop`; the first time at once, or after as long.

        `name` is that of the thread, and of the probe in the log.
        """
        self._every_s = every_s
        self._look = look
        self._at_once = at_once
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns at once: a look may be under way. From any thread, also out of a look. Safe to call twice."""
        self._stopped.set()

    def join(self) -> None:
        """Waits after `stop` for the look under way, at most `JOIN_S`; what it refers to is then free. Returns at once
        where a look calls it, and before `start`.
        """
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def finish(self) -> None:
        """Stops, waits for the look that is under way, and looks once more."""
        self.stop()
        self._thread.join()
        self._look_once()

    def _run(self) -> None:
        if self._at_once:
            self._look_once()
        while not self._stopped.wait(self._every_s):
            self._look_once()

    def _look_once(self) -> None:
        try:
            self._look()
        except Exception:  # the next look comes in any case
            logger.warning("%s: a probe failed", self._thread.name, exc_info=True)


@contextmanager
def probed(*loops: ProbeLoop) -> Iterator[None]:
    """Runs probes for as long as the block lasts. Each looks once more in the end."""
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.stop()
        for loop in loops:
            loop.finish()


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
        self._loop = ProbeLoop("watchdog", LOOK_EVERY_S, self._report)

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        """`on_frozen` is not called after this, unless the call is just about to be made."""
        self._loop.stop()

    def join(self) -> None:
        """Waits after `stop` for the look under way."""
        self._loop.join()

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

    def _report(self) -> None:
        if self.look():
            self.stop()
            logger.error("no progress for %.1f s while there is work", self._verdict.still_s)
            self._on_frozen(self._verdict.still_s)
