"""Shared weights: packed weights that all processes of one user on one machine have in memory once.

They are in a memory file (`memfd_create`), which is named by the digest of all its inputs, and sealed once it is
complete: then it cannot change. Who wants the same weights finds it among the open files of the user's processes, and
maps it. It goes with the last process that has it, whichever that is; nothing is on disk, and nothing is left behind.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.executors.cpu.build import digest as digest_of_sources
from holdfast.worker.executors.cpu.tile_memory import Arena
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.mapped_files import MappedFiles
from holdfast.worker.executors.stored_matrix import StoredMatrix, for_all

logger = logging.getLogger(__name__)

LARGE_PAGE: Final = 2 << 20  # bytes of a huge page of x86-64
WAIT_S: Final = 60.0
"""Seconds to wait for another process that packs the same weights. After that this one packs its own."""

_LOOK_EVERY_S: Final = 0.02
_PREFIX: Final = "holdfast-weights-"
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAP_FIXED: Final = 0x10  # <linux/mman.h>
_MADV_HUGEPAGE: Final = 14  # <linux/mman.h>
_MADV_COLLAPSE: Final = 25  # <linux/mman.h>, Linux 6.1


class SharedArena(Arena):
    """Memory of a memory file: a new one, which this process fills, or a sealed one, which holds the weights."""

    def __init__(self, file: int, *, turn: socket.socket | None = None) -> None:
        """`turn` is held until a new file is whole. Both are closed by this."""
        super().__init__()
        self.is_packed = turn is None
        self._file, self._turn = file, turn
        self._maps: list[tuple[int, int]] = []
        """Address and length of each chunk, which follow each other in the file."""
        end = weakref.finalize(self, _close, file, turn, self._maps)
        end.atexit = False  # steps may still run on other threads: mapped memory is released with the process

    def finish(self) -> None:
        if self._turn is None:
            assert self._num_bytes == os.fstat(self._file).st_size, "equal names mean equal weights"
            return
        reader = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
        offset = 0
        for address, length in self._maps:  # over what could be written, which a seal would not allow
            _map(reader, length, offset, mmap.PROT_READ, address)
            offset += length
        try:
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            logger.info("the packed weights are not shared, because they cannot be sealed: %s", error)
        os.dup2(reader, self._file, inheritable=False)
        os.close(reader)
        self._turn.close()

    @property
    def _num_bytes(self) -> int:
        return sum(length for _, length in self._maps)

    def _chunk(self, num_bytes: int) -> int:
        length, offset = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE, self._num_bytes
        if self.is_packed:
            assert offset + length <= os.fstat(self._file).st_size, "equal names mean equal weights"
        else:
            os.ftruncate(self._file, offset + length)
        protection = mmap.PROT_READ if self.is_packed else mmap.PROT_READ | mmap.PROT_WRITE
        address = _map(self._file, length, offset, protection, _reserve(length))
        self._maps.append((address, length))
        if not self.is_packed:
            _in_large_pages(address, length)
        return address


def arena_for(layout: DecoderLayout, form: str) -> Arena:
    """The arena of a layout's packed weights: shared with processes that have the same, where the system supports it.

    `form`: the instruction class that reads them, and how they are packed.
    """
    if not shares_large_pages():
        return Arena()
    name = _PREFIX + layout_digest(layout, form)
    turn: socket.socket | None = None
    try:
        turn = _take_turn(name)
        found = find_file(name)
        if found is not None:
            turn.close()
            return SharedArena(found)
        return SharedArena(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), turn=turn)
    except OSError as error:
        logger.info("the packed weights are not shared: %s", error)
        if turn is not None:
            turn.close()
        return Arena()


@cache
def shares_large_pages() -> bool:
    """Whether shared memory gets large pages, if a process's own gets them: a step takes up to a tenth longer
    without. Systems before Linux 6.1 give none unless they are set to.
    """
    if not _has_setting("enabled", ("always", "madvise")):
        return True
    if _has_setting("shmem_enabled", ("always", "within_size", "advise", "force")):
        return True
    try:
        with open(os.memfd_create("holdfast-probe", os.MFD_CLOEXEC), "r+b") as file:
            os.ftruncate(file.fileno(), LARGE_PAGE)
            address = _map(file.fileno(), LARGE_PAGE, 0, mmap.PROT_READ | mmap.PROT_WRITE, _reserve(LARGE_PAGE))
            is_large = _in_large_pages(address, LARGE_PAGE)
            _libc().munmap(address, LARGE_PAGE)
    except OSError:
        return False
    return is_large


def _has_setting(name: str, values: tuple[str, ...]) -> bool:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage", name).read_text()
    except OSError:
        return False
    return any(f"[{value}]" in text for value in values)


def _in_large_pages(address: int, length: int) -> bool:
    """Asks for them whatever the system's settings are, on all threads, since the system clears them. They must be
    there when others map the file.
    """
    pages = length // LARGE_PAGE
    share = -(-pages // min(pages, torch.get_num_threads())) * LARGE_PAGE
    outcomes: list[int] = []

    def collapse(start: int) -> None:
        end = min(start + share, address + length)
        for page in range(start, end, LARGE_PAGE):
            ctypes.memset(page, 0, 1)  # an entry that is missing cannot become a large one
        outcomes.append(_libc().madvise(start, end - start, _MADV_COLLAPSE))

    for_all(collapse, range(address, address + length, share))
    return not any(outcomes)


def find_file(name: str) -> int | None:
    """A sealed memory file of this name that a process of this user has open, as a descriptor for reading."""
    for path in _open_files():
        with suppress(OSError):  # files and processes end while they are looked at
            if os.readlink(path) != f"/memfd:{name} (deleted)":
                continue
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS and os.fstat(file).st_uid == os.geteuid():
                return file
            os.close(file)
    return None


def _open_files() -> Iterator[str]:
    for process in os.scandir("/proc"):
        with suppress(OSError):
            if process.name.isdecimal() and process.stat().st_uid == os.geteuid():
                yield from (f"{process.path}/fd/{number}" for number in os.listdir(f"{process.path}/fd"))


def _take_turn(name: str) -> socket.socket:
    """One process at a time packs the same weights. Whatever ends it, its turn ends with it.

    Raises `TimeoutError`, an `OSError`.
    """
    turn = socket.socket(socket.AF_UNIX)
    limit_s = time.monotonic() + WAIT_S
    try:
        while True:
            try:
                turn.bind(f"\0{name}-{os.geteuid()}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > limit_s:
                    raise TimeoutError(f"another process has packed the same for {WAIT_S:g} s") from error
                time.sleep(_LOOK_EVERY_S)
            else:
                return turn
    except BaseException:
        turn.close()
        raise


def layout_digest(layout: DecoderLayout, form: str) -> str:
    """Digest of all inputs of packed weights: this code, and the layout with the contents of its weights.

    What lies in a file, or was made of that, counts by its place there and the file's state; other weights by their
    bytes.
    """
    digest = blake2b(f"{digest_of_sources()} {form}".encode(), digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    _describe(layout, MappedFiles(), digest)
    return digest.hexdigest()


def _describe(part: object, files: MappedFiles, digest: Any) -> None:
    if isinstance(part, Tensor):
        digest.update(f"{part.dtype} {tuple(part.shape)} ".encode())
        if not part.is_meta:
            digest.update(_state_in_file(part, files) or _bytes_of(part))
    elif isinstance(part, tuple):
        digest.update(f"{len(part)}(".encode())
        for item in part:
            _describe(item, files, digest)
    elif isinstance(part, StoredMatrix) and part.made_of is not None:
        _describe(part.made_of, files, digest)
    elif is_dataclass(part):
        digest.update(type(part).__name__.encode())
        for field in fields(part):
            _describe(getattr(part, field.name), files, digest)
    else:
        digest.update(f"{part!r};".encode())


def _state_in_file(tensor: Tensor, files: MappedFiles) -> bytes | None:
    place = files.place_of(tensor)
    if place is None:
        return None
    try:
        state = os.stat(place.path)
    except OSError:
        return None
    if state.st_ino != place.inode:  # another file has its name by now
        return None
    parts = state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, place.offset, tensor.stride()
    return repr(parts).encode()


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy()


def _reserve(length: int) -> int:
    """An address where so much can be mapped in large pages."""
    address = _map(-1, length + LARGE_PAGE, 0, 0)
    aligned = -(-address // LARGE_PAGE) * LARGE_PAGE
    _libc().munmap(address, aligned - address)
    _libc().munmap(aligned + length, address + LARGE_PAGE - aligned)
    return aligned


def _map(file: int, length: int, offset: int, protection: int, address: int | None = None) -> int:
    """Maps a file at `address`, replacing an earlier mapping, or at any free address. Raises `OSError`."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file < 0 else mmap.MAP_SHARED
    found: int = _libc().mmap(address, length, protection, flags | (_MAP_FIXED if address else 0), file, offset)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"{length} bytes cannot be mapped")
    if file >= 0:
        _libc().madvise(found, length, _MADV_HUGEPAGE)
    return found


def _close(file: int, turn: socket.socket | None, maps: list[tuple[int, int]]) -> None:
    for address, length in maps:
        _libc().munmap(address, length)
    os.close(file)
    if turn is not None:
        turn.close()


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return libc
