"""Crash journals of the routers of one machine: what each reads lies in a file that the end of its process leaves.

A file is mapped into the memory of its router, so that a note costs no call and outlives SIGKILL. The other routers of
the machine watch the process, and one that starts later finds the file. What may not live here: what the end of a
router says of a request (`router/requests/poison_watch.py`).
"""

import asyncio
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.router.requests.poison_watch import FORGET_S, HUNG_S, Entry, PoisonWatch, losses_of
from holdfast.router.router_losses import RouterLoss
from holdfast.worker.supervision.process_id import ProcessId
from holdfast.worker.suspicion import Suspicion

logger = logging.getLogger(__name__)

SUFFIX: Final = ".reading"
LOOK_S: Final = 0.5
"""How often a router shows that its loop turns, and looks for files of others."""

NUM_PLACES: Final = 1024
"""Requests that are read at a time. Of more, no note is taken."""

_HEAD: Final = struct.Struct("<8sdd??6x")
"""Magic, time of the last turn of the loop (monotonic, and since 1970), whether the end was its own fault, whether it
ended in order."""
_MAGIC: Final = b"hf-read1"
_TURN_AT: Final = 8
_OWN_FAULT_AT: Final = 24
_IN_ORDER_AT: Final = 25
_DIGEST_BYTES: Final = 16
_PLACE_BYTES: Final = 1 + _DIGEST_BYTES
_KNOWN_GOOD: Final = 0x10
_TAKEN: Final = 0x80
_SIZE: Final = _HEAD.size + NUM_PLACES * _PLACE_BYTES


class CrashJournal:
    """A `Journal` in a file of its own, of this process."""

    def __init__(self, folder: Path) -> None:
        """Makes the file, which is for this user alone. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / f"{ProcessId.of(os.getpid())}{SUFFIX}"
        with open(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, _SIZE)  # no write to the map may fail where the disk is full
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._free = list(range(NUM_PLACES, 0, -1))
        _HEAD.pack_into(self._map, 0, _MAGIC, time.monotonic(), time.time(), False, False)

    def enter(self, digest: str, suspicion: Suspicion, *, is_known_good: bool) -> int:
        """Place 0 is none."""
        if not self._free or not digest:
            return 0
        place = self._free.pop()
        at = _HEAD.size + (place - 1) * _PLACE_BYTES
        state = _TAKEN | suspicion | (_KNOWN_GOOD if is_known_good else 0)
        self._map[at : at + _PLACE_BYTES] = bytes((state,)) + bytes.fromhex(digest)
        return place

    def leave(self, place: int) -> None:
        if place:
            self._map[_HEAD.size + (place - 1) * _PLACE_BYTES] = 0
            self._free.append(place)

    def turn(self) -> None:
        """The event loop turns."""
        struct.pack_into("<dd", self._map, _TURN_AT, time.monotonic(), time.time())

    def note_no_memory(self) -> None:
        """Memory has run out, and the process ends. Allocates nothing to speak of."""
        self._map[_OWN_FAULT_AT] = 1

    def close(self) -> None:
        """The process ends in order: it has nothing to tell."""
        self._map[_IN_ORDER_AT] = 1
        self.path.unlink(missing_ok=True)


class LeftJournal:
    """The file of another process, to be read once that has ended."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, ValueError for what is no journal."""
        self.path = path
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        if self._map[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"{path} is no crash journal")

    def note_end(self, now: float) -> None:
        """The process ends at this monotonic time. That it had hung by then, those who come later cannot know."""
        turned_at: float = _HEAD.unpack_from(self._map)[1]
        if now - turned_at >= HUNG_S + LOOK_S:
            self._map[_OWN_FAULT_AT] = 1

    def says_nothing(self, now: float) -> bool:
        """Whether it ended in order, or long ago. `now`: seconds since 1970."""
        return bool(self._map[_IN_ORDER_AT]) or now - self._turned_s > FORGET_S

    def losses(self) -> tuple[RouterLoss, ...]:
        """What its process was reading when it ended."""
        name, is_own_fault = self.path.name.removesuffix(SUFFIX), bool(self._map[_OWN_FAULT_AT])
        return losses_of(tuple(self.entries()), name, self._turned_s, is_own_fault=is_own_fault)

    @property
    def _turned_s(self) -> float:
        turned_s: float = _HEAD.unpack_from(self._map)[2]
        return turned_s

    def entries(self) -> Iterator[Entry]:
        for at in range(_HEAD.size, _SIZE, _PLACE_BYTES):
            state = self._map[at]
            if state & _TAKEN:
                yield Entry(
                    digest=self._map[at + 1 : at + _PLACE_BYTES].hex(),
                    suspicion=Suspicion(state & 0x0F),
                    is_known_good=bool(state & _KNOWN_GOOD),
                )


class CrashJournals:
    """The journal of this router, and the watch over those of the other routers of this machine."""

    def __init__(self, folder: Path, watch: PoisonWatch) -> None:
        """`watch` notes what it reads here from now on, and is told of what others were reading. Raises OSError."""
        self._folder = folder
        self._watch = watch
        self.own = CrashJournal(folder)
        watch.journal = self.own
        self._others: dict[Path, tuple[LeftJournal, int]] = {}
        """With the descriptor of each process."""
        self._read: set[Path] = set()
        """Of processes that have ended. They are left for routers that start later, until they say nothing any more."""

    async def follow(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self.own.turn()
                self._look(loop)
                await asyncio.sleep(LOOK_S)
        finally:
            for _, process in self._others.values():
                loop.remove_reader(process)
                os.close(process)
            self._others.clear()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path in self._others or path in self._read or path == self.own.path:
                continue
            with suppress(OSError, ValueError):  # it may go, or be half made, at any moment
                journal, process = LeftJournal(path), ProcessId.parse(path.name.removesuffix(SUFFIX))
                try:
                    descriptor = process.open()
                except ProcessLookupError:
                    self._take(journal)
                    continue
                self._others[path] = journal, descriptor
                loop.add_reader(descriptor, self._ended, loop, path)

    def _ended(self, loop: asyncio.AbstractEventLoop, path: Path) -> None:
        journal, descriptor = self._others.pop(path)
        loop.remove_reader(descriptor)
        os.close(descriptor)
        journal.note_end(time.monotonic())
        self._take(journal)

    def _take(self, journal: LeftJournal) -> None:
        if journal.says_nothing(time.time()):
            journal.path.unlink(missing_ok=True)
            return
        self._read.add(journal.path)
        if losses := journal.losses():
            logger.warning("%s: a router ended while reading %d requests", journal.path.name, len(losses))
            self._watch.note(losses)
