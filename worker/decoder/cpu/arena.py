"""Arena: the memory that packed weights lie in, one after the other, in chunks of large pages.

What may live here: taking memory from the system. What may not: what lies in it (`packing.py`), and memory that
processes have in common (`shared_weights.py`).
"""

import ctypes
import mmap
from typing import Final

CHUNK_BYTES: Final = 64 << 20
CACHE_LINE: Final = 64


class Arena:
    """Memory of this process alone. Small weights by themselves would get small pages."""

    is_packed = False
    """Whether what is taken holds its weights already."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        self._next = 0
        self._end = 0

    def take(self, num_bytes: int) -> int:
        """The address of so many bytes, at the beginning of a cache line. They live as long as the arena."""
        num_bytes = -(-num_bytes // CACHE_LINE) * CACHE_LINE
        if self._next + num_bytes > self._end:
            size = max(num_bytes, CHUNK_BYTES)
            self._next = self._chunk(size)
            self._end = self._next + size
        address, self._next = self._next, self._next + num_bytes
        return address

    def finish(self) -> None:
        """All has been taken and written: nobody writes there again."""

    def _chunk(self, num_bytes: int) -> int:
        self._chunks.append(mapped_memory(num_bytes))
        return -(-address_of(self._chunks[-1]) // CACHE_LINE) * CACHE_LINE


def mapped_memory(num_bytes: int) -> mmap.mmap:
    """Zeros of the system's, which take memory once they are written to; in large pages where it can."""
    memory = mmap.mmap(-1, max(num_bytes, 1) + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= 2 << 20:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
