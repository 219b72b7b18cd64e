"""Block sockets: blocks of a cache on their way from a rank of one replica to the same rank of another, over TCP.

    receiver ─► [magic | transfer | MAC] ... [whether it reads the sender's memory]
    sender   ─► [bytes | offer of its memory] ... frames (`block_frames.py`)

A transfer has a number and a key, which both replicas know from their link and give to their ranks: a connection that
cannot prove that it has the key gets nothing. Blocks come in the order in which they were asked for, each once; the end
may come before all are there.
"""

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from holdfast.worker.cache.sealing import KeySealer, Sealer, WrongDigestError
from holdfast.worker.engine.block_frames import Block, FrameReceiver, FrameSender, received
from holdfast.worker.engine.staging import LINE_BYTES, Reader, StagedFrame, Staging, Way, offer_of, reader_of
from holdfast.worker.errors import ConfigurationError

logger = logging.getLogger(__name__)

TRANSFER_BYTES: Final = 16
KEY_BYTES: Final = 32
STAGED_BYTES: Final = 16 << 20
"""Most bytes of rows that are copied and not sent yet, besides one call's rows: a part of the staging memory."""
HANDSHAKE_S: Final = 5.0
"""Time limit of a connection's hello, by when its transfer must be known."""
STALL_S: Final = 10.0
"""A connection on which nothing moves for so long is closed."""
MAX_CONNECTIONS: Final = 64  # of one receiver

_MAGIC: Final = b"HFB3"
_HELLO: Final = struct.Struct(f"<4s{TRANSFER_BYTES}s32s")
_OFFER: Final = struct.Struct("<I")
_LARGEST_OFFER: Final = 1 << 20  # bytes
_READS, _READS_NOT = b"\x01", b"\x00"


class TransferKey(NamedTuple):
    """Transfer of blocks between two replicas: its number, and the key that all ranks of both have."""

    transfer: bytes
    key: bytes
    is_encrypted: bool = False

    @classmethod
    def fresh(cls, *, is_encrypted: bool) -> "TransferKey":
        """A new key, for one transfer."""
        return cls(secrets.token_bytes(TRANSFER_BYTES), secrets.token_bytes(KEY_BYTES), is_encrypted)

    def of_rank(self, rank: int) -> "TransferKey":
        """The part of a transfer that this rank of the receiving replica gets: a connection for itself."""
        made = hmac.digest(self.key, self.transfer + rank.to_bytes(4, "little"), "sha512")
        return TransferKey(made[:TRANSFER_BYTES], made[-KEY_BYTES:], self.is_encrypted)

    @property
    def form(self) -> type[Sealer]:
        """Form of its records: what they have besides their blocks."""
        return KeySealer if self.is_encrypted else Sealer

    @property
    def sealer(self) -> Sealer:
        return KeySealer(self.key) if self.is_encrypted else Sealer()

    def hello(self) -> bytes:
        """First message of a connection: the transfer's id, and an HMAC-SHA256 under its key."""
        mac = hmac.digest(self.key, _MAGIC + self.transfer, "sha256")
        return _HELLO.pack(_MAGIC, self.transfer, mac)


class _Outgoing:
    """Blocks of one transfer that a rank has copied, and that its connection has not sent yet."""

    def __init__(self, key: TransferKey, cut: Callable[[Block], Block] | None) -> None:
        self.key = key
        self.cut = cut
        self.frames: deque[list[Block] | StagedFrame] = deque()
        self.is_ended = False
        self.is_connected = False
        self.offered_s = time.monotonic()


class BlockServer:
    """Sends blocks of one rank to a peer that has the key of an open transfer. Its threads end with `close`."""

    def __init__(
        self,
        host: str,
        on_room: Callable[[], None] | None = None,
        way: Way | None = None,
        largest_bytes: int = 0,
    ) -> None:
        """Listens at a free port of `host`. `on_room` is called when there is room for more blocks, on some thread.
        `way`: how receivers may read this rank's memory, whose largest block has `largest_bytes`.

        Raises OSError.
        """
        self._way = way
        self._staging = Staging(largest_bytes)
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
        """Whether more blocks may be sent now."""
        return self.staged_bytes < STAGED_BYTES

    def offer(self, key: TransferKey, cut: Callable[[Block], Block] | None = None) -> None:
        """Opens a transfer, for one connection. It gets the part that `cut` makes of each block; None: all of it."""
        with self._changed:
            self._open[key.transfer] = _Outgoing(key, cut)
            self._changed.notify_all()

    def frame(self, key: TransferKey, names: Sequence[bytes], row_bytes: int) -> StagedFrame | None:
        """Memory for as many of these blocks as fit, to be sent by this key and whole; None: there is none."""
        count = (self._staging.slot_bytes - LINE_BYTES) // (row_bytes + key.form.overhead + LINE_BYTES)
        return self._staging.frame([(name, row_bytes) for name in names[:count]], key.form) if count else None

    def send(self, transfer: bytes, blocks: Sequence[Block] | StagedFrame) -> None:
        """Sends blocks next; their frame is not the caller's any longer. A transfer that is over takes none."""
        with self._changed:
            outgoing = self._open.get(transfer)
            if outgoing is None:
                self._give_back(blocks)
            elif isinstance(blocks, StagedFrame) or blocks:
                outgoing.frames.append(blocks if isinstance(blocks, StagedFrame) else list(blocks))
                self.staged_bytes += size_of(blocks)
                self._changed.notify_all()

    def end(self, transfer: bytes) -> None:
        """Ends a transfer after the blocks that were sent."""
        with self._changed:
            outgoing = self._open.get(transfer)
            if outgoing is not None:
                outgoing.is_ended = True
                self._changed.notify_all()

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
            _shut(connection)
        _shut(self._listener)
        self._listener.close()
        self._staging.close()

    # --- its threads ---

    def _accept(self) -> None:
        self._listener.settimeout(HANDSHAKE_S)
        while not self._closed:
            self._forget_missed()
            try:
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
            connection.settimeout(HANDSHAKE_S)
            magic, asked, mac = _HELLO.unpack(received(connection, _HELLO.size))
            outgoing = self._taken(asked) if magic == _MAGIC else None
            if outgoing is None:
                return
            if not hmac.compare_digest(_HELLO.pack(magic, asked, mac), outgoing.key.hello()):
                outgoing.is_connected = False
                return
            transfer = asked
            _tune(connection)
            self._send_all(connection, outgoing)
        except (OSError, EOFError) as error:
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
            self._changed.wait_for(lambda: self._closed or transfer in self._open, HANDSHAKE_S)
            outgoing = self._open.get(transfer)
            if outgoing is None or outgoing.is_connected:
                return None
            outgoing.is_connected = True
            return outgoing

    def _send_all(self, connection: socket.socket, outgoing: _Outgoing) -> None:
        sealer, is_read = outgoing.key.sealer, self._is_read(connection)
        frames = FrameSender(connection, sealer, self._staging, is_read=is_read)
        noted_s = 0.0  # of this thread, which began with the connection
        try:
            while (blocks := self._next_blocks(outgoing, frames)) is not None:
                num_sent = 0
                try:
                    sent = blocks
                    if outgoing.cut is not None and not isinstance(blocks, StagedFrame):
                        sent = [outgoing.cut(block) for block in blocks]
                    frames.send(sent)
                    num_sent = size_of(sent)
                finally:
                    with self._changed:
                        self.staged_bytes -= size_of(blocks)
                        self.num_sent_bytes += num_sent
                        self.sending_s += (now_s := time.thread_time()) - noted_s
                        noted_s = now_s
                        self._changed.notify_all()
                self._tell_of_room()
            if not self._closed:
                frames.end()
        finally:
            frames.close()

    def _is_read(self, connection: socket.socket) -> bool:
        """Whether the receiver reads the staging memory."""
        offer = offer_of(self._way, self._staging)
        connection.sendall(_OFFER.pack(len(offer)) + offer)
        return bool(offer) and received(connection, 1) == _READS

    def _next_blocks(self, outgoing: _Outgoing, frames: FrameSender) -> list[Block] | StagedFrame | None:
        """The next blocks to send, which are the connection's from now on; None at the end."""
        if not outgoing.frames:
            frames.settle()  # no slot waits with it
        with self._changed:
            self._changed.wait_for(lambda: self._closed or outgoing.is_ended or bool(outgoing.frames))
            return outgoing.frames.popleft() if outgoing.frames and not self._closed else None

    def _forget_missed(self) -> None:
        """No peer has connected for these transfers."""
        oldest_s = time.monotonic() - 2 * HANDSHAKE_S
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
            while outgoing.frames:
                blocks = outgoing.frames.popleft()
                self.staged_bytes -= size_of(blocks)
                self._give_back(blocks)

    def _give_back(self, blocks: Sequence[Block] | StagedFrame) -> None:
        if isinstance(blocks, StagedFrame):
            self._staging.give_back(blocks.slot)


class BlockReceiver:
    """Receives the blocks of one transfer on a separate thread."""

    def __init__(
        self,
        address: tuple[str, int],
        key: TransferKey,
        names: Sequence[bytes],
        on_blocks: Callable[[Sequence[Block]], bool],
        on_end: Callable[[Exception | None], None],
        way: Way | None = None,
    ) -> None:
        """`names` are those of the blocks in order. `on_blocks` takes correct blocks, in order; it returns whether more
        are wanted, and may wait. `on_end` is called once: with what went wrong, or None. `way`: how the sender's memory
        may be read.
        """
        self._address = address
        self._key = key
        self._names = names
        self._on_blocks = on_blocks
        self._on_end = on_end
        self._way = way
        self._connection: socket.socket | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="holdfast-blocks-in", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Nothing more is wanted."""
        self._closed = True
        if self._connection is not None:
            _shut(self._connection)

    def _run(self) -> None:
        error: Exception | None = None
        try:
            with socket.create_connection(self._address, HANDSHAKE_S) as connection:
                self._connection = connection
                connection.sendall(self._key.hello())
                _tune(connection)
                self._receive(connection)
        except BlockingIOError:  # the kernel's word for the end of a wait
            error = None if self._closed else TimeoutError(f"nothing came for {STALL_S:g} s")
        except (OSError, EOFError, WrongDigestError, ValueError, ConfigurationError) as failure:
            error = None if self._closed else failure
        self._on_end(error)

    def _receive(self, connection: socket.socket) -> None:
        sealer = self._key.sealer
        reader = self._reader(connection)
        try:
            frames = FrameReceiver(connection, sealer, self._names, reader, STALL_S)
            while not self._closed and not frames.is_complete:
                blocks = frames.next()
                if blocks is None or not self._on_blocks(blocks):
                    return
        finally:
            if reader is not None:
                reader.close()

    def _reader(self, connection: socket.socket) -> Reader | None:
        """Reads the sender's memory, if it has offered it and it can be read here."""
        (num_bytes,) = _OFFER.unpack(received(connection, _OFFER.size))
        if num_bytes > _LARGEST_OFFER:
            raise ValueError(f"an offer of {num_bytes} bytes, where {_LARGEST_OFFER} is the limit")
        if not num_bytes:
            return None
        reader = reader_of(self._way, received(connection, num_bytes))
        connection.sendall(_READS_NOT if reader is None else _READS)
        return reader


def _tune(connection: socket.socket) -> None:
    """Sends words at once, even if those before are not confirmed: each end waits for the other's.

    Waits of `STALL_S` at most, kept by the kernel: a timeout of Python's costs a `poll` for each call, and lets the
    kernel move less by one, which takes a third of the throughput over loopback.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    limit = struct.pack("@ll", int(STALL_S), int(STALL_S % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def size_of(blocks: Sequence[Block] | StagedFrame) -> int:
    """Bytes of rows."""
    return blocks.num_bytes if isinstance(blocks, StagedFrame) else sum(len(row) for _, row in blocks)
