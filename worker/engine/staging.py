"""Staging memory: where a sender puts blocks that a receiver reads without the connection between them.

Which way blocks are read is a setting of both ends, and the connection's own stream where they differ, or where the way
does not lead there. The sender makes an offer, and the receiver takes it or not. On one host the receiver maps the
sender's memory file; a tag in it shows that it is the sender's, and not a file of another host's process. By NIXL the
memory is read wherever it is (`nixl_way.py`). Neither changes what is checked: a digest covers every block, and no
receiver's memory is written to by a sender.
"""

import json
import logging
import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.cache.sealing import Sealer
from holdfast.worker.executors.kv_cache import BlockRows
from holdfast.worker.executors.row_places import RowPlaces

logger = logging.getLogger(__name__)

SLOT_BYTES: Final = 512 << 10
FRAME_BYTES: Final = 8 << 20
"""Most bytes of a frame, which takes slots in a row: each one costs both ends some time. Larger blocks go over the
connection."""
STAGING_BYTES: Final = 40 << 20
LINE_BYTES: Final = 64
"""Rows in a slot begin at a cache line: copies that do not take a quarter longer."""
TAG_BYTES: Final = 32
_NAME: Final = "holdfast-blocks"


class Staging:
    """Memory of one sender, in slots of equal size. Used by several threads."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.tag = secrets.token_bytes(TAG_BYTES)
        self.file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self.file, STAGING_BYTES + TAG_BYTES)
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.file, 0), np.uint8)
        self.memory[STAGING_BYTES:] = np.frombuffer(self.tag, np.uint8)
        self._lock = threading.Lock()
        self._is_free = bytearray(b"\x01" * (STAGING_BYTES // SLOT_BYTES))

    def frame(self, blocks: Sequence[tuple[bytes, int]], form: type[Sealer]) -> "StagedFrame | None":
        """A frame for blocks of these names and bytes of rows; None: they are too large, or there is no room."""
        places = Places.of(tuple(num_bytes + form.overhead for _, num_bytes in blocks), form.before)
        slots = None if places.num_bytes > FRAME_BYTES else self._take(-(-places.num_bytes // SLOT_BYTES))
        if slots is None:
            return None
        return StagedFrame(
            self.memory, slots, [name for name, _ in blocks], places.moved(slots.start * SLOT_BYTES), form
        )

    def _take(self, count: int) -> range | None:
        """Free slots in a row, the first ones: caches have them."""
        with self._lock:
            first = self._is_free.find(b"\x01" * count)
            if first < 0:
                return None
            self._is_free[first : first + count] = bytes(count)
            return range(first, first + count)

    def give_back(self, slots: range) -> None:
        """These slots are free again."""
        with self._lock:
            self._is_free[slots.start : slots.stop] = b"\x01" * len(slots)

    @property
    def num_free(self) -> int:
        """Slots that no connection holds."""
        return sum(self._is_free)

    def close(self) -> None:
        """No receiver can map it any more."""
        os.close(self.file)


class Places(NamedTuple):
    """Places of records in a memory."""

    lengths: Sequence[int]
    """Bytes of each record."""
    firsts: Sequence[int]
    num_bytes: int
    """Up to the end of the last one."""

    @classmethod
    @lru_cache(64)
    def of(cls, lengths: tuple[int, ...], before: int) -> "Places":
        """Records one after the other; the row of each begins so many bytes behind it, at the next cache line."""
        firsts, end = [], 0
        for length in lengths:
            firsts.append(end + -(end + before) % LINE_BYTES)
            end = firsts[-1] + length
        return cls(lengths, firsts, end)

    def moved(self, by: int) -> "Places":
        """The same, so many bytes further on."""
        return Places(self.lengths, [by + first for first in self.firsts], by + self.num_bytes)

    def records(self, memory: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The records that lie in this memory."""
        return [memory[first : first + length] for first, length in zip(self.firsts, self.lengths, strict=True)]


def lines_of(num_bytes: int) -> NDArray[np.uint8]:
    """Uninitialized memory that begins at a cache line."""
    memory = np.empty(num_bytes + LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % LINE_BYTES
    return memory[first : first + num_bytes]


class StagedFrame:
    """Blocks in slots, as records."""

    def __init__(
        self, memory: NDArray[np.uint8], slots: range, names: Sequence[bytes], places: Places, form: type[Sealer]
    ) -> None:
        """`memory`: that of all slots. `form`: what a record has besides its row."""
        self.memory = memory
        self.slots = slots
        self.names = names
        self.places = places
        self.form = form
        self.num_bytes = sum(places.lengths) - form.overhead * len(names)
        """Bytes of rows."""
        self.held_bytes = len(slots) * SLOT_BYTES
        """Bytes of its slots, until they are given back."""
        self.is_sealed = False

    @property
    def records(self) -> list[NDArray[np.uint8]]:
        return self.places.records(self.memory)

    @property
    def rows(self) -> list[NDArray[np.uint8]]:
        """Places of the blocks' rows."""
        first, after = self.form.before, self.form.overhead - self.form.before
        return [record[first : len(record) - after] for record in self.records]

    def fill(self, pool: BlockRows, block_ids: Sequence[int], *, past_caches: bool) -> None:
        """Copies its blocks out of a pool, with their digests where a copy can take them. `past_caches`:
        another core reads them next.
        """
        seeds = self.form.seeds(self.names)
        firsts = [first + self.form.before for first in self.places.firsts]
        past_caches = past_caches and seeds is not None
        pool.read_into(block_ids, RowPlaces(self.memory, firsts, pool.row_bytes, seeds, past_caches))
        self.is_sealed = seeds is not None

    def seal(self, sealer: Sealer) -> None:
        """Completes its records."""
        if not self.is_sealed:
            for name, record in zip(self.names, self.records, strict=True):
                sealer.seal_in_place(name, record.data)
            self.is_sealed = True


class Reader(Protocol):
    """Reads the slots of one sender's staging memory, for one connection."""

    def read(self, slot: int, num_bytes: int) -> NDArray[np.uint8]:
        """Bytes from a slot on, which stay until the next call; the sender may change them meanwhile. Raises OSError,
        and ValueError if the memory does not have them.
        """
        ...

    def close(self) -> None:
        """Ends its use."""
        ...


class Way(Protocol):
    """One way of reading another rank's staging memory. Used by several threads."""

    kind: str

    def offer(self, staging: Staging) -> dict[str, Any]:
        """Facts that a receiver needs, as JSON. Raises OSError."""
        ...

    def reader(self, offer: dict[str, Any]) -> Reader:
        """Reads what was offered. Raises OSError where the way does not lead there, and ValueError, KeyError or
        TypeError for a malformed offer.
        """
        ...


def offer_of(way: Way | None, staging: Staging | None) -> bytes:
    """A sender's message; empty: blocks follow their frames."""
    if way is None or staging is None:
        return b""
    return json.dumps({"kind": way.kind, "slot_bytes": SLOT_BYTES, **way.offer(staging)}).encode()


def reader_of(way: Way | None, message: bytes) -> Reader | None:
    """Reads what a sender offers; None: it cannot be read here."""
    if way is None or not message:
        return None
    try:
        offer = json.loads(message)
        return way.reader(offer) if offer["kind"] == way.kind else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.info("blocks of the other replica come over the connection: %s: %s", type(error).__name__, error)
        return None


class SharedMemory:
    """Between processes of one user on one host. What is mapped stays mapped while its sender lives."""

    kind = "shared memory"

    def __init__(self) -> None:
        self._mapped: dict[str, NDArray[np.uint8]] = {}
        """Memory by the path of its sender's file."""

    def offer(self, staging: Staging) -> dict[str, Any]:
        return {"process": os.getpid(), "file": staging.file, "tag": staging.tag.hex()}

    def reader(self, offer: dict[str, Any]) -> Reader:
        path = f"/proc/{int(offer['process'])}/fd/{int(offer['file'])}"
        tag, slot_bytes = bytes.fromhex(offer["tag"]), int(offer["slot_bytes"])
        for gone in [one for one in list(self._mapped) if not os.path.exists(one)]:
            self._mapped.pop(gone, None)
        memory = self._mapped.get(path)
        if memory is None or memory[-TAG_BYTES:].tobytes() != tag:
            memory = self._mapped[path] = _mapped(path)
        if memory[-TAG_BYTES:].tobytes() != tag:
            raise OSError("its memory file is on another host")
        return _MappedSlots(memory[:-TAG_BYTES], slot_bytes)


def _mapped(path: str) -> NDArray[np.uint8]:
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise OSError("its memory file is on another host")
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(file, 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)


class _MappedSlots:
    def __init__(self, memory: NDArray[np.uint8], slot_bytes: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes

    def read(self, slot: int, num_bytes: int) -> NDArray[np.uint8]:
        check_slot(slot, num_bytes, self._slot_bytes, len(self._memory))
        return self._memory[slot * self._slot_bytes :][:num_bytes]

    def close(self) -> None:
        """The mapping stays for the next transfer."""


def check_slot(slot: int, num_bytes: int, slot_bytes: int, staging_bytes: int) -> None:
    """Raises ValueError unless the staging memory has these bytes from the slot on."""
    if slot < 0 or slot * slot_bytes + num_bytes > staging_bytes:
        raise ValueError(f"{num_bytes} bytes from slot {slot} on, where there are {staging_bytes // slot_bytes} slots")
