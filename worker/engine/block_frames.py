"""Frames: blocks of a transfer on their way over one connection, some at a time.

    sender ─► [count, bytes, slot | lengths | records] ... [0, 0, -1]        receiver ─► [slot is free] ...

Each record is a block that is sealed (`sealing.py`): its digest is checked before a byte of it is used. Records follow
their frame's head, or lie in a slot of the sender's staging memory, from which the receiver reads them (`staging.py`).
The receiver says once it has read a slot; records that are larger than a slot, or find none, follow the head.
"""

import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.cache.sealing import Sealer
from holdfast.worker.engine.staging import FRAME_BYTES, LINE_BYTES, StagedFrame, Staging

LARGEST_FRAME: Final = 1 << 30  # bytes
HEAD: Final = struct.Struct("<IQi")
IN_LINE: Final = -1
"""In place of a slot: the records follow."""
MAX_FRAMES: Final = 2
"""Frames that were copied for one connection alone and are not read yet."""

MOST_NOW: Final = 100
"""Blocks of a frame whose head a socket always has room for, with those of all other frames."""

PORTION_BYTES: Final = 2 << 20
"""Sealed and sent at a time: a core's cache still has most of it when the kernel copies it."""
_MAX_PARTS: Final = 512
"""Parts of one call: Linux takes 1,024."""
FREE: Final = b"\x01"
MAX_WORDS: Final = 64
"""Words of a receiver that are read at a time."""

Block = tuple[bytes, NDArray[np.uint8]]
"""A name and its row."""
Record = Sequence[memoryview | bytes]


class _Unread(NamedTuple):
    """A frame in slots that the receiver has not read yet."""

    slots: range
    held_bytes: int
    """Bytes that `on_free` is told of."""
    sent_s: float


class FrameSender:
    """The sending end of one connection. Used by one thread."""

    def __init__(
        self,
        connection: socket.socket,
        sealer: Sealer,
        staging: Staging,
        *,
        is_read: bool,
        on_free: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`is_read`: whether the receiver reads the staging memory; else all records follow their heads. `on_free` is
        told of the bytes of slots that were given back.
        """
        self._connection = connection
        self._sealer = sealer
        self._staging = staging
        self._is_read = is_read
        self._on_free = on_free
        self._unread: deque[_Unread] = deque()
        """In order."""

    def left_s(self, limit_s: float) -> float:
        """Time that is left until the first frame has been unread for this long. Raises TimeoutError: none."""
        try:
            left_s = self._unread[0].sent_s + limit_s - time.monotonic()
        except IndexError:
            return limit_s
        if left_s <= 0:
            raise TimeoutError(f"a receiver has read nothing for {limit_s:g} s")
        return left_s

    def send(self, blocks: Sequence[Block]) -> None:
        """Sends blocks. Raises OSError, and EOFError where the receiver has left."""
        if not self._is_read:
            self._send_in_line(blocks)
            return
        for batch in self._batches(blocks):
            while len(self._unread) >= MAX_FRAMES:
                self.await_some()
            frame = self._staged(batch)
            if frame is None:
                self._send_in_line(batch)
            else:
                self.send_staged(frame)

    def send_staged(self, frame: StagedFrame) -> None:
        """Sends a frame, whose slots are this connection's from now on. Raises as `send`."""
        self._note(frame)
        frame.seal(self._sealer)
        head = _head(frame.places.lengths, frame.slots.start if self._is_read else IN_LINE)
        if self._is_read:
            self._connection.sendall(head)
            return
        parts: Record = [head, *(record.data for record in frame.records)]
        for first in range(0, len(parts), _MAX_PARTS):
            _send_parts(self._connection, parts[first : first + _MAX_PARTS])
        self._free(1)

    def send_now(self, frame: StagedFrame) -> bool:
        """Sends a frame by `send_staged`, from any thread while the connection's waits, if that takes no time: whether
        it has.
        """
        if not (self._is_read and frame.is_sealed and len(frame.names) <= MOST_NOW):
            return False
        self._note(frame)
        head = _head(frame.places.lengths, frame.slots.start)
        with suppress(OSError):
            if self._connection.send(head, socket.MSG_DONTWAIT) == len(head):
                return True
        with suppress(OSError):  # its thread is told, and gives all slots back
            self._connection.shutdown(socket.SHUT_RDWR)
        return True

    def _note(self, frame: StagedFrame) -> None:
        self._unread.append(_Unread(frame.slots, frame.held_bytes, time.monotonic()))

    def end(self) -> None:
        """Says that nothing more comes, and waits until all slots are read."""
        self._connection.sendall(HEAD.pack(0, 0, IN_LINE))
        while self._unread:
            self.await_some()

    def await_some(self) -> None:
        """Waits until the receiver has read some more frames. Raises as `take_words`."""
        self._take(self._connection.recv(MAX_WORDS))

    def take_words(self) -> bool:
        """Gives back the slots of frames that the receiver has read by now; False: it has read all and left. From any
        thread. Raises OSError, EOFError where it has left before, and ValueError for what is no word of a receiver.
        """
        try:
            words = self._connection.recv(MAX_WORDS, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        if not words and not self._unread:
            return False
        self._take(words)
        return True

    def _take(self, words: bytes) -> None:
        checked(len(words))
        if len(words) > len(self._unread):
            with suppress(OSError):  # whichever thread has read the words, the connection's finds its end
                self._connection.shutdown(socket.SHUT_RDWR)
            raise ValueError("a receiver has read more frames than it was told of")
        self._free(len(words))

    def close(self) -> None:
        """Gives its slots back."""
        self._free(len(self._unread))

    def _free(self, count: int) -> None:
        num_bytes = 0
        for _ in range(count):
            frame = self._unread.popleft()
            self._staging.give_back(frame.slots)
            num_bytes += frame.held_bytes
        if num_bytes:
            self._on_free(num_bytes)

    def _batches(self, blocks: Sequence[Block]) -> Iterator[list[Block]]:
        """Blocks that fit in a frame together."""
        batch: list[Block] = []
        num_bytes = 0
        for block in blocks:
            length = len(block[1]) + self._sealer.overhead + LINE_BYTES
            if batch and num_bytes + length > FRAME_BYTES:
                yield batch
                batch, num_bytes = [], 0
            batch.append(block)
            num_bytes += length
        if batch:
            yield batch

    def _staged(self, blocks: Sequence[Block]) -> StagedFrame | None:
        """A copy in slots, if there is room."""
        frame = self._staging.frame([(name, len(row)) for name, row in blocks], type(self._sealer))
        if frame is not None:
            frame.held_bytes = 0  # the blocks themselves are what is held
            for place, (_, row) in zip(frame.rows, blocks, strict=True):
                np.copyto(place, row)
        return frame

    def _send_in_line(self, blocks: Sequence[Block]) -> None:
        """Sends blocks behind their head, by one call of the kernel for each portion."""
        parts: list[memoryview | bytes] = [_head([len(row) + self._sealer.overhead for _, row in blocks], IN_LINE)]
        num_bytes = 0
        for name, row in blocks:
            parts += self._sealer.seal(name, row.data)
            num_bytes += len(row)
            if num_bytes >= PORTION_BYTES or len(parts) >= _MAX_PARTS:
                _send_parts(self._connection, parts)
                parts, num_bytes = [], 0
        if parts:
            _send_parts(self._connection, parts)


def received(connection: socket.socket, num_bytes: int) -> bytes:
    """This number of bytes. Raises OSError, and EOFError where the other side has closed the connection."""
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, left: memoryview) -> None:
    """Fills this memory. Raises like `received`."""
    while left:
        left = left[checked(connection.recv_into(left, 0, socket.MSG_WAITALL)) :]


def checked(count: int) -> int:
    """The number of bytes that came. Raises EOFError: none will."""
    if not count:
        raise EOFError("the other replica has closed the connection")
    return count


def _head(lengths: Sequence[int], slot: int) -> bytes:
    return HEAD.pack(len(lengths), sum(lengths), slot) + struct.pack(f"<{len(lengths)}I", *lengths)


def _send_parts(connection: socket.socket, parts: Sequence[memoryview | bytes]) -> None:
    num_sent = connection.sendmsg(parts)
    for part in parts:
        if num_sent < len(part):
            connection.sendall(memoryview(part)[num_sent:])
        num_sent = max(0, num_sent - len(part))
