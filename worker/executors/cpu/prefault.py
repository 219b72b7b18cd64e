"""Memory of pages that is taken from the system ahead of its use: the first write to a page of it costs a fault."""

import ctypes
import errno
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.worker.executors.cpu.tile_memory import address_of, mapped_memory
from holdfast.worker.executors.mapped_files import discard
from holdfast.worker.executors.step_batch import IntArray

LARGE_PAGE: Final = 2 << 20  # bytes of a huge page of x86-64
AHEAD_BYTES: Final = 4 * LARGE_PAGE
"""Bytes of each layer that have their memory beyond the last block that was used, unless all of it is wanted."""
QUIET_S: Final = 0.02
"""A pause of steps that is longer than those between the steps of a burst."""

_MADV_POPULATE_WRITE: Final = 23  # <linux/mman.h>


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of a layer, or of several: `num_blocks` blocks of `block_bytes` each, one after the other."""

    memory: mmap.mmap
    num_blocks: int
    block_bytes: int

    @classmethod
    def mapped(cls, num_blocks: int, block_bytes: int) -> "Pages":
        """Memory that the system gives at the first write."""
        return cls(mapped_memory(num_blocks * block_bytes), num_blocks, block_bytes)

    def give_back(self, block_ids: IntArray) -> None:
        """Returns the memory of these blocks, ascending, to the system: their content is lost."""
        base = address_of(self.memory)
        for run in np.split(block_ids, np.flatnonzero(np.diff(block_ids) != 1) + 1):
            if run.size:
                discard(base + int(run[0]) * self.block_bytes, base + (int(run[-1]) + 1) * self.block_bytes)

    def wanted(self, used: int, ahead_bytes: int) -> int:
        """Number of blocks to prefault, for this number of bytes beyond the used ones."""
        return min(self.num_blocks, used - -ahead_bytes // self.block_bytes)


def populate(pages: Pages, begin: int, end: int) -> bool:
    """Backs the bytes [begin, end) with memory that can be written at once. Their contents stay as they are.

    False where this kernel (before Linux 5.14) or its memory does not allow it: then writes do it, as ever.
    """
    base = address_of(pages.memory)
    first = (base + begin) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    while libc.madvise(first, base + end - first, _MADV_POPULATE_WRITE):
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            return False
    return True


class KvPrefault:
    """A thread for the pages of all layers. Small caches have no such log."""

    def __init__(
        self,
        layers: Sequence[Pages],
        *,
        populate: Callable[[Pages, int, int], bool] = populate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layers = [layer for layer in layers if layer.num_blocks * layer.block_bytes > LARGE_PAGE]
        self._populate = populate
        self._clock = clock
        self._num_running = 0
        """Steps that have begun and not ended."""
        self._last_step_s = clock()
        self._used = 0
        """Blocks up to the last one that was used."""
        self._ahead_bytes = AHEAD_BYTES
        self._more = threading.Event()
        self._closed = threading.Event()
        self.is_on = bool(self._layers)
        """Whether it wants to know of each step. To be read only."""
        if self._layers:
            self._more.set()
            threading.Thread(target=self._work, name="holdfast-kv-prefault", daemon=True).start()

    def want_all(self) -> None:
        """Takes the pages of all blocks from now on, while there are no steps."""
        self._ahead_bytes = max((layer.num_blocks * layer.block_bytes for layer in self._layers), default=0)
        self._more.set()

    def begin_step(self) -> None:
        """Makes the thread wait from now on, but for a page that it has begun, and for pages that come soon."""
        self._num_running += 1

    def end_step(self, last_block: int) -> None:
        """The step used blocks up to this one."""
        self._num_running -= 1
        self._last_step_s = self._clock()
        self.note_use(last_block)

    def note_use(self, last_block: int) -> None:
        """Blocks up to this one are used."""
        if last_block >= self._used:
            self._used = last_block + 1
            self._more.set()

    def close(self) -> None:
        """Ends the thread, after a page that it has begun: until then it holds the memory."""
        self._closed.set()
        self._more.set()

    def _work(self) -> None:
        done = [0] * len(self._layers)
        while True:
            self._more.wait()
            self._more.clear()
            while index := self._next(done):
                if not self._may_begin(done, index - 1) or not self._back_one(done, index - 1):
                    return
            if self._closed.is_set():
                return

    def _next(self, done: list[int]) -> int:
        """The number, from 1, of the layer that has fewest blocks ready and needs more. 0: all have enough."""
        lacking = [
            (blocks, number)
            for number, (layer, blocks) in enumerate(zip(self._layers, done, strict=True), 1)
            if blocks < layer.wanted(self._used, self._ahead_bytes)
        ]
        return 0 if self._closed.is_set() else min(lacking, default=(0, 0))[1]

    def _back_one(self, done: list[int], index: int) -> bool:
        layer = self._layers[index]
        end = min(layer.num_blocks, done[index] + max(1, LARGE_PAGE // layer.block_bytes))
        worked = self._populate(layer, done[index] * layer.block_bytes, end * layer.block_bytes)
        done[index] = end
        return worked

    def _may_begin(self, done: list[int], index: int) -> bool:
        """Waits until no step has run for a while, or the layer's next page is the last that it has. False: closed."""
        while self._is_busy() and done[index] >= self._layers[index].wanted(self._used, LARGE_PAGE):
            if self._closed.wait(QUIET_S):
                return False
        return not self._closed.is_set()

    def _is_busy(self) -> bool:
        return self._num_running > 0 or self._clock() - self._last_step_s < QUIET_S
