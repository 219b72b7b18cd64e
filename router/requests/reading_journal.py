"""Reading journal: notes of the requests that a router reads, in memory that outlives its process. A core without IO.

    journal = ReadingJournal(buffer)    # of this router: a mapped file, or any other memory of `SIZE` bytes
    journal.begin(monotonic_s)
    LeftJournal(buffer).losses(router, monotonic_s, now_s)  # of another router, once its process has ended

All times are passed in, monotonic ones of the machine: its wall clock may jump.
"""

import struct
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from holdfast.router.requests.poison_watch import FORGET_S, HUNG_S, Entry, losses_of
from holdfast.router.router_losses import RouterLoss
from holdfast.worker.request import PoisonRisk

TURN_S: Final = 0.5
"""Seconds between a router's signs that its loop turns."""

MAX_HUNG_S: Final = 60.0
"""Seconds that a request waits at most for the end of a router that hangs with it."""

NUM_PLACES: Final = 1024
"""Requests that are read at a time. Of more, no note is taken."""

Buffer: TypeAlias = Any
"""Bytes that can be read, and written in place: a `bytearray`, or a map."""

_HEAD: Final = struct.Struct("<8sd??6x")
"""Magic, time of the last turn of the loop, whether the end was its own fault, whether it ended in order."""
_MAGIC: Final = b"hf-read2"
_TURN_AT: Final = 8  # offset in bytes
_OWN_FAULT_AT: Final = 16  # offset in bytes
_IN_ORDER_AT: Final = 17  # offset in bytes
_DIGEST_BYTES: Final = 16
_PLACE_BYTES: Final = 1 + _DIGEST_BYTES
_KNOWN_GOOD: Final = 0x10  # bit of a place's state
_TAKEN: Final = 0x80  # bit of a place's state
SIZE: Final = _HEAD.size + NUM_PLACES * _PLACE_BYTES


class ReadingJournal:
    """A `Journal` in `SIZE` bytes of zeros, of this process."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._free = list(range(NUM_PLACES, 0, -1))

    def begin(self, monotonic_s: float) -> None:
        """Before the first note. From here on others may read it."""
        _HEAD.pack_into(self._buffer, 0, _MAGIC, monotonic_s, False, False)

    def enter(self, digest: str, poison_risk: PoisonRisk, *, is_known_good: bool) -> int:
        """Place 0 means none."""
        if not self._free or not digest:
            return 0
        place = self._free.pop()
        at = _HEAD.size + (place - 1) * _PLACE_BYTES
        state = _TAKEN | poison_risk | (_KNOWN_GOOD if is_known_good else 0)
        self._buffer[at : at + _PLACE_BYTES] = bytes((state,)) + bytes.fromhex(digest)
        return place

    def clear(self, place: int) -> None:
        if place:
            self._buffer[_HEAD.size + (place - 1) * _PLACE_BYTES] = 0
            self._free.append(place)

    def turn(self, monotonic_s: float) -> None:
        """The event loop turns."""
        struct.pack_into("<d", self._buffer, _TURN_AT, monotonic_s)

    def note_own_fault(self) -> None:
        """The process ends by its own fault: memory has run out. Allocates nothing to speak of."""
        self._buffer[_OWN_FAULT_AT] = 1

    def note_in_order(self) -> None:
        """Marks an orderly end of the process, after which the journal reports no losses."""
        self._buffer[_IN_ORDER_AT] = 1


class LeftJournal:
    """Journal of another process, to be read once that has ended."""

    def __init__(self, buffer: Buffer) -> None:
        """Raises ValueError for bytes that are not a journal."""
        if buffer[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it is no reading journal")
        self._buffer = buffer

    def note_end(self, monotonic_s: float) -> None:
        """Marks the end of the process as seen by a watcher. A later reader could not tell that the process had hung
        before.
        """
        if monotonic_s - self._turned_at >= HUNG_S + TURN_S:
            self._buffer[_OWN_FAULT_AT] = 1

    def is_reading(self, digest: str, silent_s: float, monotonic_s: float) -> bool:
        """Whether its process, not seen to end so far, reads the request and has not turned its loop for `silent_s`.
        False after `MAX_HUNG_S`: a hanging process that nothing ends must not block requests forever.
        """
        if not silent_s <= monotonic_s - self._turned_at <= MAX_HUNG_S:
            return False
        wanted = bytes.fromhex(digest)
        return any(one == wanted for _, one in self._taken())

    def says_nothing(self, monotonic_s: float) -> bool:
        """Whether it ended in order, or long ago: before the machine was started, too."""
        return bool(self._buffer[_IN_ORDER_AT]) or not 0.0 <= monotonic_s - self._turned_at <= FORGET_S

    def losses(self, router: str, monotonic_s: float, now_s: float) -> tuple[RouterLoss, ...]:
        """Requests that its process, the `router` of that name, was reading when it ended. `now_s`: since 1970, as in
        `PoisonWatch`.
        """
        is_own_fault = bool(self._buffer[_OWN_FAULT_AT])
        ended_s = now_s - (monotonic_s - self._turned_at)
        return losses_of(tuple(self.entries()), router, ended_s, is_own_fault=is_own_fault)

    def entries(self) -> Iterator[Entry]:
        """Messages that the ended process was reading."""
        for state, digest in self._taken():
            is_known_good = bool(state & _KNOWN_GOOD)
            yield Entry(digest=digest.hex(), poison_risk=PoisonRisk(state & 0x0F), is_known_good=is_known_good)

    def _taken(self) -> Iterator[tuple[int, bytes]]:
        """(state, digest) of the places that are taken."""
        for at in range(_HEAD.size, SIZE, _PLACE_BYTES):
            state = self._buffer[at]
            if state & _TAKEN:
                yield state, bytes(self._buffer[at + 1 : at + _PLACE_BYTES])

    @property
    def _turned_at(self) -> float:
        turned_at: float = _HEAD.unpack_from(self._buffer)[1]
        return turned_at
