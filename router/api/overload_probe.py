"""Overload probe: measures a router's resources, and takes the actions of its overload manager. The shell around
`overload_watch.py`.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final

from holdfast.router.config import OverloadConfig
from holdfast.router.overload.byte_ledger import Lease
from holdfast.router.overload.overload import Overload, OverloadWatch
from holdfast.worker.process_memory import give_back, readable_bytes, total_memory

logger = logging.getLogger(__name__)

MAX_MEMORY: Final = 4 * 2**30  # bytes
_STATM: Final = "/proc/self/statm"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def max_memory(config: OverloadConfig) -> int:
    """Resident bytes at which memory's pressure is 1."""
    return config.max_memory or min(total_memory() // 2, MAX_MEMORY)


def resident_memory() -> int:
    """Resident memory of this process, in bytes."""
    with open(_STATM, encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


class OverloadProbe:
    """Probe of one router, on its event loop."""

    def __init__(
        self, overload: Overload, num_open: Callable[[], int], resident: Callable[[], int] | None = None
    ) -> None:
        """`num_open` and `resident`, which is this process's memory by default, are asked at each look."""
        self._overload = overload
        self._watch = OverloadWatch(overload, self._log_closing)
        self._num_open = num_open
        self._resident = resident or resident_memory

    async def run(self) -> None:
        """Looks until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._watch.begin(loop.time(), self._num_open()))
            try:
                await self._look(loop.time())
            except Exception:  # a router without its probe would not protect itself
                logger.exception("an overload probe failed: internal error")

    async def _look(self, now: float) -> None:
        before = set(self._overload.active)
        must_shrink = self._watch.look(now, self._resident(), self._num_open())
        if set(self._overload.active) != before:
            self._log()
        if must_shrink:
            await asyncio.to_thread(give_back)
            self._overload.note_shrunk()

    @staticmethod
    def _log_closing(lease: Lease) -> None:
        logger.warning("a request that held %s is ended", readable_bytes(lease.held_bytes))

    def _log(self) -> None:
        overload = self._overload
        used = ", ".join(f"{name} {pressure:.0%}" for name, pressure in overload.pressures.items())
        logger.warning("overload: %s (%s of their limits)", ", ".join(overload.active) or "nothing is refused", used)
