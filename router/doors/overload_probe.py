"""Overload probe: measures what a router uses, and does what its overload manager says. The shell around `overload.py`.

What may live here: the timer by whose lateness the loop's delay is known, resident memory, ending the greediest, and
giving memory back. What may not: thresholds and choices (`router/overload/`), refusing requests
(`router/requests/request_admission.py`).
"""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final

from holdfast.router.config import OverloadConfig
from holdfast.router.overload.overload import Overload, OverloadAction
from holdfast.router.overload.pressure import Readings
from holdfast.worker.available_memory import readable_bytes, total_memory
from holdfast.worker.free_memory import give_back

logger = logging.getLogger(__name__)

BUSY_S: Final = 0.25
"""Between two looks while anything is open or any action is on."""

IDLE_S: Final = 2.0

SHRINK_EVERY_S: Final = 5.0

MOST_MEMORY: Final = 4 * 2**30
_STATM: Final = "/proc/self/statm"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def max_memory(config: OverloadConfig) -> int:
    """Resident bytes at which memory's pressure is 1."""
    return config.max_memory or min(total_memory() // 2, MOST_MEMORY)


def resident_memory() -> int:
    """Of this process, in bytes."""
    with open(_STATM, encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


class OverloadProbe:
    """Of one router, on its event loop."""

    def __init__(
        self, overload: Overload, num_open: Callable[[], int], resident: Callable[[], int] | None = None
    ) -> None:
        """`num_open` and `resident`, which is this process's memory by default, are asked at each look."""
        self._overload = overload
        self._num_open = num_open
        self._resident = resident or resident_memory
        self._shrunk_at: float | None = None

    async def run(self) -> None:
        """Looks until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            wait_s = BUSY_S if self._is_busy else IDLE_S
            self._overload.note_loop(loop.time(), wait_s)
            await asyncio.sleep(wait_s)
            try:
                await self._look(loop.time())
            except Exception:
                logger.exception("a look at the router's load failed")

    @property
    def _is_busy(self) -> bool:
        overload = self._overload
        return bool(self._num_open() or overload.ledger.num_leases or overload.active)

    async def _look(self, now: float) -> None:
        overload, before = self._overload, set(self._overload.active)
        held_bytes = overload.ledger.held_bytes
        overload.observe(
            Readings(resident_bytes=self._resident(), held_bytes=held_bytes, num_open=self._num_open()), now
        )
        if set(overload.active) != before:
            self._log()
        if overload.must_close(now):
            self._close_greediest(now)
        is_due = self._shrunk_at is None or now - self._shrunk_at >= SHRINK_EVERY_S
        if OverloadAction.SHRINK_HEAP in overload.active and is_due:
            self._shrunk_at = now
            await asyncio.to_thread(give_back)
            overload.note_shrunk()

    def _close_greediest(self, now: float) -> None:
        lease = self._overload.ledger.greediest()
        if lease is not None:
            logger.warning("a request that held %s is ended", readable_bytes(lease.held_bytes))
            lease.end(self._overload.note_closed(lease.held_bytes, now))

    def _log(self) -> None:
        overload = self._overload
        used = ", ".join(f"{name} {pressure:.0%}" for name, pressure in overload.pressures.items())
        logger.warning("overload: %s (%s of their limits)", ", ".join(overload.active) or "nothing is refused", used)
