"""Crash journals of the routers of one machine: each notes the requests that it is reading in a file that outlives its
process.

A file is mapped into the memory of its router, so that a note costs no call and outlives SIGKILL. The other routers of
the machine watch the process, and a router that starts later finds the file.
"""

import asyncio
import logging
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.router.requests.poison_watch import PoisonWatch
from holdfast.router.requests.reading_journal import SIZE, TURN_S, LeftJournal, ReadingJournal
from holdfast.worker.replica.processes import ProcessId

logger = logging.getLogger(__name__)

SUFFIX: Final = ".reading"


class CrashJournal:
    """A `Journal` of this process, in a file."""

    def __init__(self, folder: Path) -> None:
        """Makes the file, which is for this user alone. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / f"{ProcessId.of(os.getpid())}{SUFFIX}"
        with open(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, SIZE)  # no write to the map may fail where the disk is full
            self._journal = ReadingJournal(mmap.mmap(file.fileno(), SIZE))
        self.enter, self.clear = self._journal.enter, self._journal.clear
        self._journal.begin(time.monotonic())

    def turn(self) -> None:
        """The event loop turns."""
        self._journal.turn(time.monotonic())

    def note_no_memory(self) -> None:
        """Memory has run out, and the process ends."""
        self._journal.note_own_fault()

    def close(self) -> None:
        """Marks an orderly end of the process."""
        self._journal.note_in_order()
        self.path.unlink(missing_ok=True)


def left_journal(path: Path) -> LeftJournal:
    """The file of another process. Raises OSError, ValueError for a file that is not a journal."""
    with open(path, "r+b") as file:
        return LeftJournal(mmap.mmap(file.fileno(), SIZE))


class CrashJournals:
    """The journal of this router, and the watch over those of the other routers of this machine."""

    def __init__(self, folder: Path, watch: PoisonWatch) -> None:
        """`watch` notes the requests that this router reads here from now on, and gets the requests that others were
        reading. Raises OSError.
        """
        self._folder = folder
        self.own = CrashJournal(folder)
        self._others: dict[Path, tuple[LeftJournal, int]] = {}
        """Journals of other processes, each with a file descriptor."""
        self._read: set[Path] = set()
        """Journals of processes that have ended. They are kept for routers that start later, until they have no
        entries.
        """
        self.serve(watch)

    def serve(self, watch: PoisonWatch) -> None:
        """Serves in place of an earlier watch, whose router found no free port."""
        self._watch = watch
        self._read.clear()
        watch.journal = self.own
        watch.is_read_elsewhere = self._is_read_elsewhere

    async def follow(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self.own.turn()
                self._look(loop)
                await asyncio.sleep(TURN_S)
        finally:
            for _, process in self._others.values():
                loop.remove_reader(process)
                os.close(process)
            self._others.clear()

    def _is_read_elsewhere(self, digest: str, silent_s: float) -> bool:
        now = time.monotonic()
        return any(journal.is_reading(digest, silent_s, now) for journal, _ in self._others.values())

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path in self._others or path in self._read or path == self.own.path:
                continue
            with suppress(OSError, ValueError):  # it may go, or be half made, at any moment
                journal, process = left_journal(path), ProcessId.parse(path.name.removesuffix(SUFFIX))
                try:
                    descriptor = process.open()
                except ProcessLookupError:
                    self._take(path, journal)
                    continue
                self._others[path] = journal, descriptor
                loop.add_reader(descriptor, self._ended, loop, path)

    def _ended(self, loop: asyncio.AbstractEventLoop, path: Path) -> None:
        journal, descriptor = self._others.pop(path)
        loop.remove_reader(descriptor)
        os.close(descriptor)
        journal.note_end(time.monotonic())
        self._take(path, journal)

    def _take(self, path: Path, journal: LeftJournal) -> None:
        now = time.monotonic()
        if journal.says_nothing(now):
            path.unlink(missing_ok=True)
            return
        self._read.add(path)
        if losses := journal.losses(path.name.removesuffix(SUFFIX), now, self._watch.now()):
            logger.warning("%s: a router ended while reading %d requests", path.name, len(losses))
            self._watch.note(losses)
