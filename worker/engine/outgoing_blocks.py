"""Outgoing blocks of one rank: copied out of its caches between two steps, and sent to ranks of other replicas
(`block_sockets.py`).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from holdfast.worker.engine.block_frames import Block
from holdfast.worker.engine.block_sockets import BlockServer, size_of
from holdfast.worker.engine.incoming_blocks import Taker
from holdfast.worker.engine.staging import Way
from holdfast.worker.engine.tier_mover import MoverCounts, Place
from holdfast.worker.engine.transfer_key import TransferKey
from holdfast.worker.executors.kv_cache import BlockRows

MAX_STAGED_BYTES: Final = 128 << 20
"""Most bytes of rows for other replicas on one rank. The leader decides by its own count: a slower rank ends its
transfer."""


TRIAL: Final = 50
"""One copy of so many is made the other way."""


class _Copies:
    """Whether copies into slots go past this core's caches: as it took less time lately. Where the reader's core shares
    a cache with it, they need not; else each line that was read there must be asked back before it is written.
    """

    def __init__(self) -> None:
        self._s_per_byte = {False: 0.0, True: 0.0}  # so that both are tried first
        self._count = 0

    def goes_past(self) -> bool:
        self._count += 1
        return (self._s_per_byte[True] < self._s_per_byte[False]) is not (self._count % TRIAL == 0)

    def note(self, past: bool, s_per_byte: float) -> None:
        old = self._s_per_byte[past]
        self._s_per_byte[past] = (old + s_per_byte) / 2 if old else s_per_byte


class OutgoingBlocks:
    """Used by the thread of the rank's steps. Connections are served by threads of their own."""

    def __init__(
        self, pools: Mapping[bytes, BlockRows], way: Way | None, counts: MoverCounts, on_sent: Callable[[], None]
    ) -> None:
        """`pools`: where blocks of each kind lie. `way`: how ranks of other replicas read blocks of this one's, besides
        connections. `on_sent` is called when there is room for more, on some thread.
        """
        self._pools = pools
        self._way = way
        self._counts = counts
        self._on_sent = on_sent
        self._lock = threading.Lock()
        self._server: BlockServer | None = None
        self._transfers: dict[int, Sequence[Taker]] = {}  # by the leader's number
        self._copies = _Copies()

    def close(self) -> None:
        """Ends all transfers."""
        if self._server is not None:
            self._server.close()

    def listen(self, host: str) -> int:
        """Listens for other replicas from now on; the port. Raises OSError."""
        if self._server is None:
            self._server = BlockServer(host, self._note_sent, self._way)
        return self._server.port

    def offer(self, number: int, takers: Sequence[Taker]) -> None:
        """Opens a transfer to another replica, to these ranks of it, which the leader calls by this number."""
        assert self._server is not None, "it listens before it offers"
        self._transfers[number] = takers
        for key, cut in takers:
            self._server.offer(key, cut)

    def send(self, number: int, places: Sequence[Place]) -> None:
        """Copies these blocks, to be sent in this order. No places: nothing more comes."""
        takers = self._transfers.get(number)
        if takers is None or self._server is None:
            return
        if not places or self._server.staged_bytes >= MAX_STAGED_BYTES:
            for key, _ in takers:
                self._server.end(key.transfer)
            del self._transfers[number]
        elif len(takers) == 1 and takers[0].cut is None:
            self._send_staged(self._server, takers[0].key, places)
        else:
            blocks = copied(self._pools, places, self._counts) if takers else []
            for key, _ in takers:
                self._server.send(key.transfer, blocks)

    def has_room(self, number: int) -> bool | None:
        """Whether more may be sent; None: the other side wants nothing more."""
        takers = self._transfers.get(number)
        if not takers or self._server is None or not all(self._server.is_open(key.transfer) for key, _ in takers):
            return None
        return self._server.has_room

    def _send_staged(self, server: BlockServer, key: TransferKey, places: Sequence[Place]) -> None:
        """Copies these blocks to where their connection sends them from, or elsewhere where no room is there."""
        can_go_past = server.is_read(key) and not key.is_encrypted  # what is encrypted is read here once more
        for kind, pool in self._pools.items():
            left = [one for one in places if one[0].startswith(kind)]
            while left:
                began_s = time.thread_time()
                frame = server.frame(key, [name for name, _ in left], pool.row_bytes)
                if frame is None:
                    server.send(key.transfer, copied(self._pools, left, self._counts))
                    break
                some, left = left[: len(frame.names)], left[len(frame.names) :]
                past = can_go_past and self._copies.goes_past()
                frame.fill(pool, [place for _, place in some], past_caches=past)
                if can_go_past:
                    self._copies.note(past, (time.thread_time() - began_s) / frame.num_bytes)
                server.send(key.transfer, frame)
                self._counts.note("copy_s_per_byte", began_s, time.thread_time(), frame.num_bytes)

    def _note_sent(self) -> None:
        with self._lock:
            if self._server is not None:
                self._counts.note_sent(self._server.num_sent_bytes, self._server.sending_s)
        self._on_sent()


def copied(pools: Mapping[bytes, BlockRows], places: Sequence[Place], counts: MoverCounts) -> list[Block]:
    """A copy of these blocks, first those of one kind, then of the other; its CPU time is counted."""
    began_s = time.thread_time()
    batch: list[Block] = []
    for kind, pool in pools.items():
        own = [(name, place) for name, place in places if name.startswith(kind)]
        if own:
            rows = pool.read([place for _, place in own])
            batch += zip([name for name, _ in own], rows, strict=True)
    counts.note("copy_s_per_byte", began_s, time.thread_time(), size_of(batch))
    return batch
