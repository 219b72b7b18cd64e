"""Probe loop: a thread that looks at something at regular times. What must not live here: what a look finds."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class ProbeLoop:
    """One probe on a thread of its own, so that a probe that waits holds up no other. A look that fails is logged."""

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
        except Exception:
            logger.warning("%s: a look has failed", self._thread.name, exc_info=True)


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
