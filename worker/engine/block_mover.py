"""Block mover of one rank: copies blocks between its caches and its block store, on a separate thread, and into its
caches from those of ranks of other replicas. What goes to them is in `outgoing_blocks.py`.

The thread that runs the rank's steps copies rows out of the caches and into them, between two steps; disk, sockets,
digests and encryption are handled elsewhere. Reading goes before writing. Blocks are read in pieces, so that the first
are in the cache while the last are read. No thread ever waits for the disk but this one, and, for a moment, a rank
whose piece is late.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np

from holdfast.worker.cache.sealing import WrongDigestError
from holdfast.worker.engine.block_frames import Block
from holdfast.worker.engine.block_sockets import size_of
from holdfast.worker.engine.frame_receiver import FrameMemory
from holdfast.worker.engine.incoming_blocks import IncomingBlocks, Transfer
from holdfast.worker.engine.outgoing_blocks import OutgoingBlocks, copied
from holdfast.worker.engine.staging import Way
from holdfast.worker.engine.tier_mover import KV, MoverCounts, MoverEvents, Place, Store
from holdfast.worker.executors.block_layout import Bytes
from holdfast.worker.executors.kv_cache import BlockRows
from holdfast.worker.request import StoredPin

logger = logging.getLogger(__name__)

STAGED_BYTES: Final = 32 << 20
"""Most bytes of rows that are copied and not written yet, or one call's rows."""
AHEAD_BYTES: Final = 64 << 20
"""Pieces that are read and not taken yet."""
NEWS_S: Final = 1.0
"""Time between two looks at what other processes have stored."""
LATE_S: Final = 0.5
"""Seconds to wait for a piece that the leader already has."""
PAUSE_S: Final = 5.0
"""Pause in seconds after a failed write."""
_CLOSE_S: Final = 5.0


class _Fetch:
    def __init__(self, ticket: int, names: Sequence[bytes], piece: int) -> None:
        self.ticket = ticket
        self.pieces = deque(names[first : first + piece] for first in range(0, len(names), piece))
        self.read: deque[dict[bytes, Bytes]] = deque()
        self.receiver: IncomingBlocks | None = None
        """Connections, of blocks that come from another replica."""
        self.received: dict[bytes, Bytes] = {}
        """Blocks of the next piece that are there."""
        self.began_s = 0.0
        self.num_bytes = 0


class BlockMover:
    """Used by the thread of the rank's steps, and by its own."""

    def __init__(self, store: Store | None, pools: dict[bytes, BlockRows], way: Way | None = None) -> None:
        """`pools`: where blocks of each kind lie. `way`: how ranks of other replicas read blocks of this one's, besides
        connections. The thread starts with `start`, if there is a store.
        """
        self.counts = MoverCounts()
        self.outgoing = OutgoingBlocks(pools, way, self.counts, self._tell_sent)
        self._way = way
        self._frame_memory = FrameMemory()
        self._store = store
        self._pools = pools
        self._events: MoverEvents | None = None
        self._changed = threading.Condition()
        self._writes: deque[list[Block]] = deque()
        self._kept: deque[tuple[Sequence[bytes], str, float]] = deque()
        self._listings: deque[Future[list[StoredPin]]] = deque()
        self._fetches: dict[int, _Fetch] = {}
        self._ahead_bytes = 0
        self._closed = False
        self._failing: set[str] = set()  # operations that failed the last time
        self._paused_until = 0.0
        self._thread = threading.Thread(target=self._work, name="holdfast-blocks", daemon=True)
        self._measure()

    def start(self, events: MoverEvents | None = None) -> None:
        """Starts the thread; `events` are the leader's: the first one reports the blocks that are in the store."""
        self._events = events
        if self._store is not None:
            self._tell_news()
            self._thread.start()

    def close(self) -> None:
        """Writes the staged blocks, if the disk is quick, and ends."""
        with self._changed:
            self._closed = True
            receivers = [fetch.receiver for fetch in self._fetches.values() if fetch.receiver is not None]
            self._changed.notify_all()
        for receiver in receivers:
            receiver.close()
        self.outgoing.close()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    # --- for the thread of the steps ---

    @property
    def has_store(self) -> bool:
        """Whether there is a store below the caches."""
        return self._store is not None

    @property
    def has_room(self) -> bool:
        """Whether more rows may be stored."""
        return self.counts.staged_bytes < STAGED_BYTES

    def store(self, places: Sequence[Place]) -> None:
        """Copies these blocks, to be written in the background. Without room they are left out."""
        if not self.has_room or self._store is None:
            return
        batch = copied(self._pools, places, self.counts)
        with self._changed:
            self._writes.append(batch)
            self.counts.staged_bytes += size_of(batch)
            self._changed.notify_all()

    def keep(self, names: Sequence[bytes], tenant: str, ttl_s: float) -> None:
        """Keeps these blocks in the store for this number of seconds, within the tenant's share, from about a second
        from now, or ends that, as `BlockStore.keep`.
        """
        self._kept.append((names, tenant, ttl_s))

    def kept_prefixes(self) -> "Future[list[StoredPin]]":
        """Prefixes that the store keeps; none where there is no store, or it fails. From any thread."""
        future = Future[list[StoredPin]]()
        with self._changed:
            if self._store is None or self._closed:
                future.set_result([])
            else:
                self._listings.append(future)
                self._changed.notify_all()
        return future

    def fetch(self, ticket: int, names: Sequence[bytes], piece: int) -> None:
        """Begins to read these blocks, `piece` of them at a time. No names: the ticket's blocks are not wanted."""
        with self._changed:
            if names:
                self._fetches[ticket] = _Fetch(ticket, names, piece)
            elif (fetch := self._fetches.pop(ticket, None)) is not None:
                self._ahead_bytes -= sum(sum(map(len, piece.values())) for piece in fetch.read)
                if fetch.receiver is not None:
                    fetch.receiver.close()
            self._changed.notify_all()

    # --- for the thread of the steps: from other replicas ---

    def receive(self, ticket: int, transfer: Transfer, piece: int) -> None:
        """Begins to receive the blocks of a transfer, `piece` of them at a time."""
        fetch = _Fetch(ticket, transfer.names, piece)
        fetch.began_s = time.monotonic()
        fetch.receiver = IncomingBlocks(
            transfer,
            lambda blocks: self._take_in(fetch, blocks),
            lambda error: self._note_received(fetch, transfer, error),
            self._way,
            self._frame_memory,
        )
        with self._changed:
            self._fetches[ticket] = fetch
        fetch.receiver.start()

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
                pool.write([place for _, place in own], [found[name] for name, _ in own])
        return [name in found for name, _ in places]

    # --- its own thread ---

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(self._has_work, NEWS_S) and not self._closed:
                    fetch, batch = None, None
                elif (fetch := self._next_fetch()) is None and self._closed and not self._writes:
                    break
                else:
                    batch = self._writes[0] if fetch is None and self._writes else None
            if fetch is not None:
                self._read_piece(fetch)
            elif batch is not None:
                self._write(batch)
            self._tell_news()
            if batch is not None:
                self._note_written(batch)
            self._list_kept()
        if self._store is not None:
            self._tell_news()
            self._list_kept()
            self._store.close()

    def _has_work(self) -> bool:
        return self._closed or bool(self._writes or self._listings) or self._next_fetch() is not None

    def _list_kept(self) -> None:
        while self._listings:
            future, found = self._listings.popleft(), list[StoredPin]()
            try:
                found = [] if self._store is None else self._store.kept_prefixes(KV)
            except OSError as error:
                self._complain("looking into", error)
            future.set_result(found)

    def _next_fetch(self) -> _Fetch | None:
        if self._closed or self._ahead_bytes >= AHEAD_BYTES:
            return None
        return next((one for one in self._fetches.values() if one.pieces and one.receiver is None), None)

    def _read_piece(self, fetch: _Fetch) -> None:
        began_s = time.monotonic()
        found: dict[bytes, Bytes] = {}
        assert self._store is not None, "its thread runs"
        try:
            for name in fetch.pieces[0]:
                data = self._store.get(name)
                if data is not None and len(data) == self._pools[name[:1]].row_bytes:
                    found[name] = np.frombuffer(data, np.uint8)
            self._failing.discard("reading from")
        except OSError as error:
            self._complain("reading from", error)
        size = sum(map(len, found.values()))
        self.counts.note("read_s_per_byte", began_s, time.monotonic(), size)
        self._hand_on(fetch, found)

    def _hand_on(self, fetch: _Fetch, found: dict[bytes, Bytes]) -> bool:
        """The next piece of a fetch is there. Whether it is still wanted."""
        with self._changed:
            fetch.pieces.popleft()
            if self._fetches.get(fetch.ticket) is not fetch:
                return False
            fetch.read.append(found)
            self._ahead_bytes += sum(map(len, found.values()))
            self._changed.notify_all()
        if self._events is not None:
            self._events.on_piece(fetch.ticket)
        return True

    def _write(self, batch: list[Block]) -> None:
        began_s = time.thread_time()
        assert self._store is not None, "its thread runs"
        try:
            if time.monotonic() >= self._paused_until:
                self._store.put([(name, row.data) for name, row in batch])
                self._failing.discard("writing to")
                self.counts.note("write_s_per_byte", began_s, time.thread_time(), size_of(batch))
        except OSError as error:
            self._complain("writing to", error)
            self._paused_until = time.monotonic() + PAUSE_S

    def _note_written(self, batch: list[Block]) -> None:
        with self._changed:
            self._writes.popleft()
            self.counts.staged_bytes -= size_of(batch)
        if self._events is not None:
            self._events.on_written()

    def _tell_news(self) -> None:
        assert self._store is not None, "its thread runs"
        try:
            while self._kept:
                self._store.keep(*self._kept.popleft())
            came, gone = self._store.news()
            self.counts.num_blocks, self.counts.num_bytes = self._store.num_blocks, self._store.num_bytes
        except OSError as error:
            self._complain("looking into", error)
            return
        self._failing.discard("looking into")
        self.counts.num_failures = self._store.num_failures
        if self._events is not None and (came or gone):
            self._events.on_news(came, gone)

    # --- threads of connections ---

    def _take_in(self, fetch: _Fetch, blocks: Sequence[Block]) -> bool:
        """Blocks have come, in order, and are right. Waits while too many are ahead; whether more are wanted."""
        for name, row in blocks:
            if len(row) != self._pools[name[:1]].row_bytes:
                raise ValueError(f"a block of {len(row)} bytes, where this replica's have another size")
            fetch.received[name] = row
            fetch.num_bytes += len(row)
            if fetch.pieces and len(fetch.received) == len(fetch.pieces[0]):
                found, fetch.received = fetch.received, {}
                if not self._hand_on(fetch, found):
                    return False
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._ahead_bytes < AHEAD_BYTES or self._fetches.get(fetch.ticket) is not fetch
            )
            return not self._closed and self._fetches.get(fetch.ticket) is fetch

    def _note_received(self, fetch: _Fetch, transfer: Transfer, error: Exception | None) -> None:
        """The connections are closed. An incomplete piece is handed on, and its missing blocks are computed."""
        self.counts.num_received_bytes += fetch.num_bytes
        host, port = transfer.senders[0].address
        if not transfer.is_computing:
            self.counts.note_speed(host, time.monotonic() - fetch.began_s, fetch.num_bytes)
        if isinstance(error, WrongDigestError):
            self.counts.num_failures += 1
        if error is not None:
            self.counts.num_errors += not isinstance(error, WrongDigestError)
            logger.warning("blocks from the replica at %s:%d are computed here: %s", host, port, error)
        if not fetch.pieces:
            return
        if fetch.received:
            self._hand_on(fetch, fetch.received)
        if fetch.pieces and self._fetches.get(fetch.ticket) is fetch and self._events is not None:
            self._events.on_failed(fetch.ticket)

    def _tell_sent(self) -> None:
        if self._events is not None:
            self._events.on_written()

    def _complain(self, what: str, error: OSError) -> None:
        """Counts every failure, and logs the first in a row of those operations."""
        self.counts.num_errors += 1
        if what not in self._failing:
            logger.warning("%s the block store failed; this operation was skipped: %s", what, error)
            self._failing.add(what)

    def _measure(self) -> None:
        """Measures the least cost of reading, before anything was read: digest and copy of some rows."""
        if self._store is None:
            return
        rows = np.zeros(4 << 20, np.uint8)
        began_s = time.monotonic()
        self._store.sealer.seal(KV, rows.data)
        rows.copy()
        self.counts.read_s_per_byte = (time.monotonic() - began_s) / len(rows)
