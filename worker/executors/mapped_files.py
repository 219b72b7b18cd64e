"""Mapped files of this process: where in a file a tensor lies, and giving its pages back once they have been read.

A checkpoint is mapped, so a page that was read counts as memory of the process until it is given back; the system keeps
it in its cache.
"""

import ctypes
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

_PAGE: Final = mmap.PAGESIZE
_MADV_DONTNEED: Final = 4

_HEADER: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+)\s+(/.*)$")
"""Start, end, offset in the file, inode and path of a mapping of `/proc/self/smaps`."""


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
    is_pure: bool
    """None of its pages has been written to: all are as in the file."""


class MappedFiles:
    """The files that were mapped when this was made."""

    def __init__(self) -> None:
        self._mappings = [mapping for mapping in _read_mappings() if mapping.is_pure]

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
        return next((one for one in self._mappings if one.start <= start and end <= one.end), None)


def discard_contents(tensor: Tensor) -> None:
    """Gives back the memory of a tensor that nobody reads any more: what it holds is lost, or as in its file."""
    discard(*span(tensor))


def discard(start: int, end: int) -> None:
    """Gives back the whole pages between two addresses."""
    first, last = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
    if first < last:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)


def trim_heap() -> None:
    """Gives back what the C heap keeps free, where the C library can."""
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
    """A view of a mapped file. `offset` in bytes. Raises ValueError where it would not lie in the file."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if offset % dtype.itemsize or offset < 0 or offset + (last + 1) * dtype.itemsize > storage.nbytes():
        raise ValueError(f"there is no {dtype} tensor of shape {shape} at byte {offset} of the file")
    return torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape, strides)


def span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and past its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _read_mappings() -> list[_Mapping]:
    smaps = Path("/proc/self/smaps")
    mappings: list[_Mapping] = []
    header: re.Match[str] | None = None
    for line in smaps.read_text().splitlines() if smaps.is_file() else ():
        if line.startswith("Anonymous:"):
            if header is not None:
                start, end, offset = (int(header[n], 16) for n in (1, 2, 3))
                is_pure = line.split()[1] == "0"
                mappings.append(_Mapping(start, end, offset, int(header[4]), header[5], is_pure))
            header = None
        elif not line[:1].isupper():
            header = _HEADER.match(line)
    return mappings


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
