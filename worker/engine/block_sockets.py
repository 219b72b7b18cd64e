"""Block sockets: blocks of a cache on their way from a rank of one replica to the same rank of another, over TCP.

    receiver ─► [magic | transfer | MAC] ... [whether it reads the sender's memory]
    sender   ─► [bytes | offer of its memory] ... frames (`block_frames.py`)

A transfer has a number and a key, which both replicas know from their link and give to their ranks: a connection that
cannot prove that it has the key gets nothing. Blocks come in the order in which they were asked for, each once; the end
may come before all are there.
"""

import hmac
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from holdfast.worker.engine import transfer_key
from holdfast.worker.engine.block_frames import Block, FrameSender, received
from holdfast.worker.engine.staging import (
    FRAME_BYTES,
    LINE_BYTES,
    STAGING_BYTES,
    StagedFrame,
    Staging,
    Way,
    offer_of,
)
from holdfast.worker.engine.transfer_key import HELLO, MAGIC, OFFER, READS, TransferKey, shut, tune

logger = logging.getLogger(__name__)

STAGED_BYTES: Final = STAGING_BYTES - FRAME_BYTES
"""Most bytes of slots that are not read yet, and of rows elsewhere that are not sent yet, besides one call's."""
MAX_CONNECTIONS: Final = 64  # of one receiver


class _Outgoing:
    """Blocks of one transfer that a rank has copied, and that its connection has not sent yet."""

    def __init__(self, key: TransferKey, cut: Callable[[Block], Block] | None) -> None:
        self.key = key
        self.cut = cut
        self.batches: deque[Sequence[Block] | StagedFrame] = deque()
        self.is_ended = False
        self.is_connected = False
        self.offered_s = time.monotonic()
        self.idle: FrameSender | None = None
        """Its connection, while it waits for more and other threads may send a frame by it."""
        self.is_read = False
        self.wants_room = False
        """Whether frames that were read are waited for."""
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._news).atexit = False

    def tell(self) -> None:
        """There is something new for its connection."""
        os.eventfd_write(self._news, 1)

    def await_news(self, connection: socket.socket, limit_s: float) -> None:
        """Waits until there is something new; or the receiver has read something, where room is wanted, or has left."""
        waiting = select.poll()
        waiting.register(self._news, select.POLLIN)
        waiting.register(connection, select.POLLRDHUP | (select.POLLIN if self.wants_room else 0))
        if self._news in dict(waiting.poll(1e3 * limit_s)):
            os.eventfd_read(self._news)


class BlockServer:
    """Sends blocks of one rank to a peer that has the key of an open transfer. Its threads end with `close`."""

    def __init__(
        self,
        host: str,
        on_room: Callable[[], None] | None = None,
        way: Way | None = None,
    ) -> None:
        """Listens at a free port of `host`. `on_room` is called when there is room for more blocks, on some thread.
        `way`: how receivers may read this rank's memory.

        Raises OSError.
        """
        self._way = way
        self._staging = Staging()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_CONNECTIONS)
        self.port: int = self._listener.getsockname()[1]
        self._on_room = on_room
        self._changed = threading.Condition()
        self._open: dict[bytes, _Outgoing] = {}
        self._connections: set[socket.socket] = set()
        self._closed = False
        self.staged_bytes = 0
        self.num_sent_bytes = 0
        self.sending_s = 0.0
        """CPU time of its connections, which digests take too."""
        threading.Thread(target=self._accept, name="holdfast-block-server", daemon=True).start()

    @property
    def has_room(self) -> bool:
        """Whether more blocks may be sent now; else `on_room` will be called."""
        if self.staged_bytes >= STAGED_BYTES:
            self._free_read(wants_room=True)
        return self.staged_bytes < STAGED_BYTES

    def offer(self, key: TransferKey, cut: Callable[[Block], Block] | None = None) -> None:
        """Opens a transfer, for one connection. It gets the part that `cut` makes of each block; None: all of it."""
        with self._changed:
            self._open[key.transfer] = _Outgoing(key, cut)
            self._changed.notify_all()

    def is_read(self, key: TransferKey) -> bool:
        """Whether the receiver reads this rank's memory: as far as is known by now."""
        outgoing = self._open.get(key.transfer)
        return outgoing is not None and outgoing.is_read

    def frame(self, key: TransferKey, names: Sequence[bytes], row_bytes: int) -> StagedFrame | None:
        """Memory for as many of these blocks as fit, to be sent by this key and whole; None: there is none."""
        count = FRAME_BYTES // (row_bytes + key.form.overhead + LINE_BYTES)
        blocks = [(name, row_bytes) for name in names[:count]]
        if not blocks or (frame := self._staging.frame(blocks, key.form)) is not None:
            return frame if blocks else None
        self._free_read(wants_room=False)
        return self._staging.frame(blocks, key.form)

    def _free_read(self, *, wants_room: bool) -> None:
        """Gives back slots that receivers have read, without a wait. `wants_room`: where that is not enough,
        connections wait for more.
        """
        with self._changed:
            for one in self._open.values():
                if one.idle is not None:
                    with suppress(OSError, EOFError, ValueError):  # its own thread finds it too
                        one.idle.take_words()
            for one in self._open.values() if wants_room and self.staged_bytes >= STAGED_BYTES else ():
                if not one.wants_room:
                    one.wants_room = True
                    one.tell()

    def send(self, transfer: bytes, blocks: Sequence[Block] | StagedFrame) -> None:
        """Sends blocks next; their frame is not the caller's any longer. A transfer that is over takes none."""
        with self._changed:
            outgoing = self._open.get(transfer)
            if outgoing is None:
                self._give_back(blocks)
            elif isinstance(blocks, StagedFrame) or blocks:
                self.staged_bytes += _held_by(blocks)
                if isinstance(blocks, StagedFrame) and outgoing.idle is not None and outgoing.idle.send_now(blocks):
                    self.num_sent_bytes += blocks.num_bytes
                    return
                outgoing.batches.append(blocks)
                outgoing.tell()

    def end(self, transfer: bytes) -> None:
        """Ends a transfer after the blocks that were sent."""
        with self._changed:
            outgoing = self._open.get(transfer)
            if outgoing is not None:
                outgoing.is_ended = True
                outgoing.tell()

    def is_open(self, transfer: bytes) -> bool:
        """Whether its connection may still take blocks."""
        return transfer in self._open

    def close(self) -> None:
        """Ends all transfers."""
        with self._changed:
            self._closed = True
            for transfer in list(self._open):
                self._forget(transfer)
            connections = list(self._connections)
            self._changed.notify_all()
        for connection in connections:
            shut(connection)
        shut(self._listener)
        self._listener.close()
        self._staging.close()

    # --- its threads ---

    def _accept(self) -> None:
        while not self._closed:
            self._forget_missed()
            try:
                self._listener.settimeout(transfer_key.HANDSHAKE_S)
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # it was closed
            with self._changed:
                if self._closed or len(self._connections) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="holdfast-blocks-out", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        transfer: bytes | None = None
        try:
            connection.settimeout(transfer_key.HANDSHAKE_S)
            magic, asked, mac = HELLO.unpack(received(connection, HELLO.size))
            outgoing = self._taken(asked) if magic == MAGIC else None
            if outgoing is None:
                return
            if not hmac.compare_digest(HELLO.pack(magic, asked, mac), outgoing.key.hello()):
                outgoing.is_connected = False
                return
            transfer = asked
            tune(connection)
            self._send_all(connection, outgoing)
        except (OSError, EOFError, ValueError) as error:
            logger.info("blocks were not sent to the end: %s", error)
        finally:
            with self._changed:
                self._connections.discard(connection)
                if transfer is not None:
                    self._forget(transfer)
                self._changed.notify_all()
            connection.close()
            self._tell_of_room()

    def _taken(self, transfer: bytes) -> _Outgoing | None:
        """A transfer without a connection, once it is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or transfer in self._open, transfer_key.HANDSHAKE_S)
            outgoing = self._open.get(transfer)
            if outgoing is None or outgoing.is_connected:
                return None
            outgoing.is_connected = True
            return outgoing

    def _send_all(self, connection: socket.socket, outgoing: _Outgoing) -> None:
        sealer = outgoing.key.sealer
        outgoing.is_read = is_read = self._is_read(connection)
        frames = FrameSender(connection, sealer, self._staging, is_read=is_read, on_free=self._note_free)
        noted_s = 0.0  # of this thread, which began with the connection
        try:
            while self._advance(frames, connection, outgoing):
                with self._changed:
                    self.sending_s += (now_s := time.thread_time()) - noted_s
                    noted_s = now_s
                if self.staged_bytes < STAGED_BYTES:
                    self._tell_of_room()
            if outgoing.is_ended and not self._closed:
                frames.end()
        finally:
            with self._changed:
                outgoing.idle = None
            frames.close()

    def _advance(self, frames: FrameSender, connection: socket.socket, outgoing: _Outgoing) -> bool:
        """Sends what is there, or waits for more; False at the end, or where the receiver has left."""
        with self._changed:
            batch = outgoing.batches.popleft() if outgoing.batches else []
            if self._closed or (outgoing.is_ended and batch == []):
                outgoing.idle = None
                return False
            outgoing.idle = frames if batch == [] else None
            outgoing.wants_room = outgoing.wants_room and self.staged_bytes >= STAGED_BYTES
        if isinstance(batch, StagedFrame):
            frames.send_staged(batch)
            self._note_sent(batch.num_bytes)
        elif batch:
            try:
                sent = batch if outgoing.cut is None else [outgoing.cut(block) for block in batch]
                frames.send(sent)
                self._note_sent(size_of(sent))
            finally:
                self._note_free(size_of(batch))
        elif not frames.take_words():
            return False
        elif not outgoing.wants_room or self.staged_bytes >= STAGED_BYTES:  # else the room is told of first
            outgoing.await_news(connection, frames.left_s(transfer_key.STALL_S))
            return self._closed or frames.take_words()
        return True

    def _note_sent(self, num_bytes: int) -> None:
        with self._changed:
            self.num_sent_bytes += num_bytes

    def _note_free(self, num_bytes: int) -> None:
        """Staged bytes become fewer."""
        with self._changed:
            self.staged_bytes -= num_bytes
            self._changed.notify_all()

    def _is_read(self, connection: socket.socket) -> bool:
        """Whether the receiver reads the staging memory."""
        offer = offer_of(self._way, self._staging)
        connection.sendall(OFFER.pack(len(offer)) + offer)
        return bool(offer) and received(connection, 1) == READS

    def _forget_missed(self) -> None:
        """No peer has connected for these transfers."""
        oldest_s = time.monotonic() - 2 * transfer_key.HANDSHAKE_S
        with self._changed:
            for transfer, outgoing in list(self._open.items()):
                if not outgoing.is_connected and outgoing.offered_s < oldest_s:
                    self._forget(transfer)

    def _tell_of_room(self) -> None:
        if self._on_room is not None and not self._closed:
            self._on_room()

    def _forget(self, transfer: bytes) -> None:
        outgoing = self._open.pop(transfer, None)
        if outgoing is not None:
            while outgoing.batches:
                batch = outgoing.batches.popleft()
                self.staged_bytes -= _held_by(batch)
                self._give_back(batch)

    def _give_back(self, batch: Sequence[Block] | StagedFrame) -> None:
        if isinstance(batch, StagedFrame):
            self._staging.give_back(batch.slots)


def size_of(blocks: Sequence[Block] | StagedFrame) -> int:
    """Bytes of rows."""
    return blocks.num_bytes if isinstance(blocks, StagedFrame) else sum(len(row) for _, row in blocks)


def _held_by(blocks: Sequence[Block] | StagedFrame) -> int:
    return blocks.held_bytes if isinstance(blocks, StagedFrame) else size_of(blocks)
