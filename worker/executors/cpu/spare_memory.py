"""Memory of large objects that come and go. Fresh pages have to be cleared, and on a virtual machine may have to be
found, which then takes 2 ms for a megabyte.
"""

import mmap
import threading
from typing import Final

from holdfast.worker.executors.cpu.prefault import LARGE_PAGE, Pages, populate
from holdfast.worker.executors.cpu.tile_memory import mapped_memory

MOST_BYTES: Final = 256 << 20
"""Larger memory is not kept."""
_PAUSE_S: Final = 0.005
"""Between two pages."""


class SpareMemory:
    """Keeps memory for the next object: that of one that is gone, or fresh memory. Safe to call from any thread."""

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []
        self._is_taken = threading.Event()
        """Event: the memory that was kept last is in use."""
        self.preparing: threading.Thread | None = None
        """The last thread that made memory ready."""

    def take(self, num_bytes: int) -> mmap.mmap:
        """Memory of at least this size, with anything in it."""
        self._is_taken.set()
        try:
            kept = self._kept.pop()
        except IndexError:
            return mapped_memory(num_bytes)
        return kept if num_bytes <= len(kept) <= 2 * num_bytes + mmap.PAGESIZE else mapped_memory(num_bytes)

    def give(self, memory: mmap.mmap) -> None:
        """Nobody uses this memory any more."""
        if len(memory) <= MOST_BYTES:
            self._kept[:] = [memory]

    def prepare(self, num_bytes: int) -> None:
        """Keeps fresh memory, if none is kept. A thread makes it ready as long as it is not in use, one large page at a
        time, so that steps meanwhile take little longer.
        """
        if num_bytes >= MOST_BYTES or self._kept or (self.preparing is not None and self.preparing.is_alive()):
            return
        self._is_taken.clear()
        self.give(memory := mapped_memory(num_bytes))
        self.preparing = threading.Thread(target=self._fault_in, args=(memory,), name="spare-memory", daemon=True)
        self.preparing.start()

    def _fault_in(self, memory: mmap.mmap) -> None:
        pages = Pages(memory, 1, len(memory))
        for first in range(0, len(memory), LARGE_PAGE):
            populate(pages, first, min(first + LARGE_PAGE, len(memory)))
            if self._is_taken.wait(_PAUSE_S):
                return
