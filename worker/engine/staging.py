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
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.cache.sealing import Sealer

logger = logging.getLogger(__name__)

SLOT_BYTES: Final = 2 << 20
"""Slots are as large, or as large as the largest block."""
MAX_SLOT_BYTES: Final = 8 << 20
"""Larger blocks go over the connection."""
STAGING_BYTES: Final = 32 << 20
PORTION_BYTES: Final = 256 << 10
"""Read at a time: a core's cache still has it when its digest is checked."""
_PAGE_BYTES: Final = 4096
LINE_BYTES: Final = 64
"""Rows in a slot begin at a cache line: copies that do not take a quarter longer."""
TAG_BYTES: Final = 32
_NAME: Final = "holdfast-blocks"


class Staging:
    """Memory of one sender, in slots of equal size. Used by several threads."""

    def __init__(self, largest_bytes: int) -> None:
        """`largest_bytes`: those of the largest block. Raises OSError."""
        pages = -(-min(largest_bytes + LINE_BYTES, MAX_SLOT_BYTES) // _PAGE_BYTES)
        self.slot_bytes = max(SLOT_BYTES, pages * _PAGE_BYTES)
        self.tag = secrets.token_bytes(TAG_BYTES)
        num_slots = STAGING_BYTES // self.slot_bytes
        self.num_bytes = num_slots * self.slot_bytes
        """Bytes of all slots; the tag follows."""
        self.file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self.file, self.num_bytes + TAG_BYTES)
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.file, 0), np.uint8)
        self.memory[self.num_bytes :] = np.frombuffer(self.tag, np.uint8)
        self._free = deque(range(num_slots))  # the last one that was given back is next: caches still have it

    def take(self) -> int | None:
        """A free slot; None: there is none."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def frame(self, blocks: Sequence[tuple[bytes, int]], form: type[Sealer]) -> "StagedFrame | None":
        """A frame for blocks of these names and bytes of rows, in a slot; None: they do not fit, or none is free."""
        places = Places.of([num_bytes + form.overhead for _, num_bytes in blocks], form)
        if places.num_bytes > self.slot_bytes or (slot := self.take()) is None:
            return None
        return StagedFrame(self.slot(slot), slot, [name for name, _ in blocks], places, form)

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    @property
    def num_free(self) -> int:
        """Slots that no connection holds."""
        return len(self._free)

    def slot(self, number: int) -> NDArray[np.uint8]:
        """The bytes of a slot."""
        return self.memory[number * self.slot_bytes :][: self.slot_bytes]

    def close(self) -> None:
        """No receiver can map it any more."""
        os.close(self.file)


class Places(NamedTuple):
    """Places of records in a slot."""

    lengths: Sequence[int]
    """Bytes of each record."""
    firsts: Sequence[int]
    num_bytes: int
    """Up to the end of the last one."""

    @classmethod
    def of(cls, lengths: Sequence[int], form: type[Sealer]) -> "Places":
        """Records one after the other, the row of each at the next cache line."""
        firsts, end = [], 0
        for length in lengths:
            firsts.append(end + -(end + form.before) % LINE_BYTES)
            end = firsts[-1] + length
        return cls(lengths, firsts, end)

    @classmethod
    def in_a_row(cls, lengths: Sequence[int]) -> "Places":
        """Records as they follow their head on a connection."""
        return cls(lengths, [0, *accumulate(lengths[:-1])], sum(lengths))

    def records(self, memory: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The records that lie in this memory."""
        return [memory[first : first + length] for first, length in zip(self.firsts, self.lengths, strict=True)]


def lines_of(num_bytes: int) -> NDArray[np.uint8]:
    """Uninitialized memory that begins at a cache line."""
    memory = np.empty(num_bytes + LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % LINE_BYTES
    return memory[first : first + num_bytes]


class StagedFrame:
    """Blocks in a slot, as records, which are not sealed yet."""

    def __init__(
        self, memory: NDArray[np.uint8], slot: int, names: Sequence[bytes], places: Places, form: type[Sealer]
    ) -> None:
        """`form`: what a record has besides its row."""
        self.slot = slot
        self.names = names
        self.places = places
        self.records = places.records(memory)
        self._form = form

    @property
    def rows(self) -> list[NDArray[np.uint8]]:
        """Places of the blocks' rows."""
        first, after = self._form.before, self._form.overhead - self._form.before
        return [record[first : len(record) - after] for record in self.records]

    @property
    def num_bytes(self) -> int:
        """Bytes of rows."""
        return sum(self.places.lengths) - self._form.overhead * len(self.names)


class Reader(Protocol):
    """Reads the slots of one sender's staging memory, for one connection."""

    def read(self, slot: int, into: NDArray[np.uint8]) -> Iterator[int]:
        """Copies the first bytes of a slot; says how many are there, each time that there are more. Raises OSError, and
        ValueError if the slot does not have them.
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
    return json.dumps({"kind": way.kind, "slot_bytes": staging.slot_bytes, **way.offer(staging)}).encode()


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
    """Between processes of one user on one host."""

    kind = "shared memory"

    def offer(self, staging: Staging) -> dict[str, Any]:
        return {"process": os.getpid(), "file": staging.file, "tag": staging.tag.hex()}

    def reader(self, offer: dict[str, Any]) -> Reader:
        path = f"/proc/{int(offer['process'])}/fd/{int(offer['file'])}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise OSError("its memory file is on another host")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = mmap.mmap(file, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(file)
        if found[-TAG_BYTES:] != bytes.fromhex(offer["tag"]):
            raise OSError("its memory file is on another host")
        return _MappedSlots(found, int(offer["slot_bytes"]))


class _MappedSlots:
    def __init__(self, memory: mmap.mmap, slot_bytes: int) -> None:
        self._memory = np.frombuffer(memory, np.uint8)[:-TAG_BYTES]
        self._slot_bytes = slot_bytes

    def read(self, slot: int, into: NDArray[np.uint8]) -> Iterator[int]:
        check_slot(slot, len(into), self._slot_bytes, len(self._memory))
        first = slot * self._slot_bytes
        for at in range(0, len(into), PORTION_BYTES):
            some = into[at : at + PORTION_BYTES]
            np.copyto(some, self._memory[first + at : first + at + len(some)])
            yield at + len(some)

    def close(self) -> None:
        """The mapping goes with the last reference."""


def check_slot(slot: int, num_bytes: int, slot_bytes: int, staging_bytes: int) -> None:
    """Raises ValueError unless the slot is one of the staging memory, and has these bytes."""
    if slot < 0 or num_bytes > slot_bytes or (slot + 1) * slot_bytes > staging_bytes:
        raise ValueError(f"{num_bytes} bytes in slot {slot}, where there are {staging_bytes // slot_bytes} slots")
