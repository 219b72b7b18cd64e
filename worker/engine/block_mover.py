"""Block mover of one rank: copies blocks between its caches and its block store, on a thread of its own.

The thread that runs the rank's steps copies rows out of the caches and into them, between two steps; all that concerns
the disk, digests and encryption is done here. Reading goes before writing. Blocks are read in pieces, so that the first
are in the cache while the last are read. No thread ever waits for the disk but this one, and, for a moment, a rank
whose piece is late.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from holdfast.worker.cache.block_store import BlockStore
from holdfast.worker.engine.tier_mover import KV, Place
from holdfast.worker.executors.block_bytes import BlockBytes, Bytes

logger = logging.getLogger(__name__)

STAGED_BYTES: Final = 32 << 20
"""Rows that are copied and not written yet: at most so many bytes, or one call's."""
AHEAD_BYTES: Final = 64 << 20
"""Pieces that are read and not taken yet."""
NEWS_S: Final = 1.0
"""Time between two looks at what other processes have stored."""
LATE_S: Final = 0.5
"""Seconds to wait for a piece that the leader already has."""
PAUSE_S: Final = 5.0
"""After a write that failed none is tried for so long."""
_CLOSE_S: Final = 5.0
_WEIGHT: Final = 0.2


class MoverEvents(NamedTuple):
    """Events for a leader, on the mover's thread."""

    on_news: Callable[[list[bytes], list[bytes]], None]
    """Names that came to the store, and those that went."""
    on_piece: Callable[[int], None]
    """The next piece of a ticket is there."""
    on_written: Callable[[], None]
    """There is room for more."""


class MoverCounts:
    """Counts of a mover. Written by its thread, read by any."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.num_bytes = 0
        self.num_failures = 0
        """Blocks with a wrong digest."""
        self.num_errors = 0
        """Writes and reads that failed."""
        self.staged_bytes = 0
        self.read_s_per_byte = 1e-9
        """Seconds per byte of the disk, digests and copies; measured."""
        self.copy_s_per_byte = 5e-10
        """CPU time of the thread of the steps; measured."""
        self.write_s_per_byte = 1e-9
        """CPU time of the mover's thread; measured."""


class _Fetch:
    def __init__(self, ticket: int, names: Sequence[bytes], piece: int) -> None:
        self.ticket = ticket
        self.pieces = deque(names[first : first + piece] for first in range(0, len(names), piece))
        self.read: deque[dict[bytes, Bytes]] = deque()


class BlockMover:
    """Used by the thread of the rank's steps, and by its own."""

    def __init__(self, store: BlockStore, pools: dict[bytes, BlockBytes]) -> None:
        """`pools`: where blocks of each kind lie. The thread starts with `start`."""
        self.counts = MoverCounts()
        self._store = store
        self._pools = pools
        self._events: MoverEvents | None = None
        self._changed = threading.Condition()
        self._writes: deque[list[tuple[bytes, Bytes]]] = deque()
        self._fetches: dict[int, _Fetch] = {}
        self._ahead_bytes = 0
        self._closed = False
        self._paused_until = 0.0
        self._thread = threading.Thread(target=self._work, name="holdfast-blocks", daemon=True)
        self._measure()

    def start(self, events: MoverEvents | None = None) -> None:
        """Starts the thread; `events` are the leader's: the first one reports the blocks that are in the store."""
        self._events = events
        self._tell_news()
        self._thread.start()

    def close(self) -> None:
        """Writes what is staged, if the disk is quick, and ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    # --- for the thread of the steps ---

    @property
    def has_room(self) -> bool:
        """Whether more rows may be stored."""
        return self.counts.staged_bytes < STAGED_BYTES

    def store(self, places: Sequence[Place]) -> None:
        """Copies these blocks, to be written in the background. Without room they are left out."""
        if not self.has_room:
            return
        began_s = time.thread_time()
        batch: list[tuple[bytes, Bytes]] = []
        for kind, pool in self._pools.items():
            own = [(name, place) for name, place in places if name.startswith(kind)]
            if own:
                rows = pool.read([place for _, place in own])
                batch += zip([name for name, _ in own], rows, strict=True)
        with self._changed:
            self._writes.append(batch)
            self.counts.staged_bytes += _size(batch)
            self._changed.notify_all()
        self._note("copy_s_per_byte", began_s, time.thread_time(), _size(batch))

    def fetch(self, ticket: int, names: Sequence[bytes], piece: int) -> None:
        """Begins to read these blocks, `piece` of them at a time. No names: what the ticket was for is not wanted."""
        with self._changed:
            if names:
                self._fetches[ticket] = _Fetch(ticket, names, piece)
            elif (fetch := self._fetches.pop(ticket, None)) is not None:
                self._ahead_bytes -= sum(sum(map(len, piece.values())) for piece in fetch.read)
            self._changed.notify_all()

    def take(self, ticket: int, places: Sequence[Place]) -> list[bool]:
        """Puts the next piece of a ticket in its places; for each of them, whether it is there now."""
        with self._changed:
            fetch = self._fetches.get(ticket)
            if fetch is None or not self._changed.wait_for(lambda: bool(fetch.read) or self._closed, LATE_S):
                return [False] * len(places)
            found = fetch.read.popleft() if fetch.read else {}
            self._ahead_bytes -= sum(map(len, found.values()))
            if not fetch.read and not fetch.pieces:
                self._fetches.pop(ticket, None)
            self._changed.notify_all()
        for kind, pool in self._pools.items():
            own = [(name, place) for name, place in places if name.startswith(kind) and name in found]
            if own:
                pool.write([place for _, place in own], np.stack([found[name] for name, _ in own]))
        return [name in found for name, _ in places]

    # --- its own thread ---

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(self._has_work, NEWS_S) and not self._closed:
                    fetch, batch = None, None
                elif (fetch := self._next_fetch()) is None and not self._writes:
                    break
                else:
                    batch = self._writes[0] if fetch is None else None
            if fetch is not None:
                self._read_piece(fetch)
            elif batch is not None:
                self._write(batch)
            self._tell_news()
            if batch is not None:
                self._note_written(batch)
        self._store.close()

    def _has_work(self) -> bool:
        return self._closed or bool(self._writes) or self._next_fetch() is not None

    def _next_fetch(self) -> _Fetch | None:
        if self._closed or self._ahead_bytes >= AHEAD_BYTES:
            return None
        return next((fetch for fetch in self._fetches.values() if fetch.pieces), None)

    def _read_piece(self, fetch: _Fetch) -> None:
        began_s = time.monotonic()
        found: dict[bytes, Bytes] = {}
        try:
            for name in fetch.pieces[0]:
                data = self._store.get(name)
                if data is not None and len(data) == self._pools[name[:1]].row_bytes:
                    found[name] = np.frombuffer(data, np.uint8)
        except OSError as error:
            self._complain("reading from", error)
        size = sum(map(len, found.values()))
        self._note("read_s_per_byte", began_s, time.monotonic(), size)
        with self._changed:
            fetch.pieces.popleft()
            if self._fetches.get(fetch.ticket) is not fetch:
                return  # it is not wanted any more
            fetch.read.append(found)
            self._ahead_bytes += size
            self._changed.notify_all()
        if self._events is not None:
            self._events.on_piece(fetch.ticket)

    def _write(self, batch: list[tuple[bytes, Bytes]]) -> None:
        began_s = time.thread_time()
        try:
            if time.monotonic() >= self._paused_until:
                self._store.put([(name, row.data) for name, row in batch])
                self._note("write_s_per_byte", began_s, time.thread_time(), _size(batch))
        except OSError as error:
            self._complain("writing to", error)
            self._paused_until = time.monotonic() + PAUSE_S

    def _note_written(self, batch: list[tuple[bytes, Bytes]]) -> None:
        with self._changed:
            self._writes.popleft()
            self.counts.staged_bytes -= _size(batch)
        if self._events is not None:
            self._events.on_written()

    def _tell_news(self) -> None:
        try:
            came, gone = self._store.news()
            self.counts.num_blocks, self.counts.num_bytes = self._store.num_blocks, self._store.num_bytes
        except OSError as error:
            self._complain("looking into", error)
            return
        self.counts.num_failures = self._store.num_failures
        if self._events is not None and (came or gone):
            self._events.on_news(came, gone)

    def _complain(self, what: str, error: OSError) -> None:
        self.counts.num_errors += 1
        logger.warning("%s the block store failed; this operation was skipped: %s", what, error)

    def _note(self, name: str, began_s: float, ended_s: float, num_bytes: int) -> None:
        if num_bytes:
            old = getattr(self.counts, name)
            setattr(self.counts, name, old + _WEIGHT * ((ended_s - began_s) / num_bytes - old))

    def _measure(self) -> None:
        """Measures the least cost of reading, before anything was read: digest and copy of some rows."""
        rows = np.zeros(4 << 20, np.uint8)
        began_s = time.monotonic()
        self._store.sealer.seal(KV, rows.data)
        rows.copy()
        self.counts.read_s_per_byte = (time.monotonic() - began_s) / len(rows)


def _size(batch: Sequence[tuple[bytes, Bytes]]) -> int:
    return sum(len(row) for _, row in batch)
