"""Mapped files of this process: where in a file a tensor lies, and giving its pages back once they have been read.

A checkpoint is mapped, so a page that was read counts as memory of the process until it is given back; the system keeps
it in its cache.
"""

import ctypes
import mmap
import re
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

_PAGE: Final = mmap.PAGESIZE
_MADV_DONTNEED: Final = 4  # <linux/mman.h>

_HEADER: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+)\s+(/.*)$")
"""Start, end, offset in the file, inode and path of a mapping of `/proc/self/maps`."""

_THERE: Final = np.uint64(3 << 62)
"""Bits of a page that is in memory or swapped out."""

_OF_FILE: Final = np.uint64(1 << 61)
"""Bit of a page of a file, or of shared memory."""

_PAGES_AT_ONCE: Final = 2**17  # pages of one mincore call


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Place of a tensor's first element in a file."""

    path: str
    """Path without symbolic links."""
    offset: int
    """Bytes from the beginning of the file."""
    inode: int
    """Inode of the mapped file, which may have lost its name since."""


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    end: int
    offset: int
    inode: int
    path: str


class MappedFiles:
    """The files that were mapped when this object was made, except files with pages that were written to in memory. The
    latter is checked at the first question about a file.
    """

    def __init__(self) -> None:
        self._mappings = _read_mappings()
        self._starts = [one.start for one in self._mappings]
        self._pure: dict[int, bool] = {}
        """Whether no page of a mapping has been written to, by the start of the mapping: all are as in the file."""

    def place_of(self, tensor: Tensor) -> FilePlace | None:
        """Place of a tensor in a file; None if it does not lie in one as a whole."""
        start, end = span(tensor)
        mapping = self._around(start, end)
        if mapping is None:
            return None
        return FilePlace(mapping.path, mapping.offset + start - mapping.start, mapping.inode)

    def give_back(self, tensor: Tensor) -> bool:
        """Lets the system take the tensor's pages from this process if they are a file's; they can be read again."""
        start, end = span(tensor)
        if self._around(start, end) is None:
            return False
        discard(start, end)
        return True

    def _around(self, start: int, end: int) -> _Mapping | None:
        at = bisect_right(self._starts, start) - 1
        if at < 0 or end > self._mappings[at].end:
            return None
        found = self._mappings[at]
        if found.start not in self._pure:
            self._pure[found.start] = _is_pure(found.start, found.end)
        return found if self._pure[found.start] else None


def discard_contents(tensor: Tensor) -> None:
    """Returns the memory of a tensor that is not read any longer: its content is lost, or is reread from its file."""
    discard(*span(tensor))


def discard(start: int, end: int) -> None:
    """Gives back the whole pages between two addresses."""
    first, last = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
    if first < last:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)


def trim_heap() -> None:
    """Returns the C heap's free memory to the system, if the C library can."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def storage_of_file(path: Path) -> torch.UntypedStorage:
    """A file as memory: pages are read when they are used, and written pages never reach the file."""
    size = path.stat().st_size
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).untyped_storage()


def tensor_in_file(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> Tensor:
    """A view of a mapped file, or a copy where the file has it at an address that no such number may have. `offset` in
    bytes. Raises ValueError where it would not lie in the file.
    """
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    end = offset + (last + 1) * dtype.itemsize
    if offset < 0 or end > storage.nbytes():
        raise ValueError(f"there is no {dtype} tensor of shape {shape} at byte {offset} of the file")
    if offset % dtype.itemsize:
        storage, offset = torch.empty(0, dtype=torch.uint8).set_(storage)[offset:end].clone().untyped_storage(), 0
    return torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape, strides)


def span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and past its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _read_mappings() -> list[_Mapping]:
    """The mappings of files, by address, as the system lists them."""
    maps = Path("/proc/self/maps")
    found = (_HEADER.match(line) for line in (maps.read_text().splitlines() if maps.is_file() else ()))
    return [
        _Mapping(int(one[1], 16), int(one[2], 16), int(one[3], 16), int(one[4]), one[5])
        for one in found
        if one is not None
    ]


def _is_pure(start: int, end: int) -> bool:
    """Whether no page between two addresses has been written to, by the page map (`pagemap` of proc(5)): none is
    anonymous, in memory or swapped out. False where it cannot be read.

    `/proc/self/smaps` says it too, and walks the pages of every library for it, which takes 25 ms.
    """
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            pages.seek(start // _PAGE * 8)
            for first in range(start // _PAGE, -(-end // _PAGE), _PAGES_AT_ONCE):
                count = min(_PAGES_AT_ONCE, -(-end // _PAGE) - first)
                entries = np.frombuffer(pages.read(count * 8), dtype=np.uint64)
                if len(entries) < count or np.any((entries & _THERE != 0) & (entries & _OF_FILE == 0)):
                    return False
    except OSError:
        return False
    return True


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
