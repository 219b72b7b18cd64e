"""Frames: blocks of a transfer on their way over one connection, some at a time.

    sender ─► [count, bytes, slot | lengths | records] ... [0, 0, -1]        receiver ─► [slot is free] ...

Each record is a block that is sealed (`sealing.py`): its digest is checked before a byte of it is used. Records follow
their frame's head, or lie in a slot of the sender's staging memory, from which the receiver reads them (`staging.py`).
The receiver says once it has read a slot; records that are larger than a slot, or find none, follow the head.
"""

import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.cache.sealing import Sealer
from holdfast.worker.engine.staging import LINE_BYTES, Places, Reader, StagedFrame, Staging, lines_of

LARGEST_FRAME: Final = 1 << 30  # bytes
HEAD: Final = struct.Struct("<IQi")
IN_LINE: Final = -1
"""In place of a slot: the records follow."""
MAX_SLOTS: Final = 4
"""Slots that a connection holds at a time."""

PORTION_BYTES: Final = 2 << 20
"""Sealed and sent at a time: a core's cache still has most of it when the kernel copies it."""
WAKE_BYTES: Final = 1 << 20
"""A receiver that waits for more is woken for so many: being woken for a few takes a third of its CPU time."""
MIN_AWAITED: Final = 1 << 16
"""Fewer bytes are waited for as they come."""
_MAX_PARTS: Final = 512
"""Parts of one call: Linux takes 1,024."""
_FREE: Final = b"\x01"

Block = tuple[bytes, NDArray[np.uint8]]
"""A name and its row."""
Record = Sequence[memoryview | bytes]


class FrameSender:
    """The sending end of one connection. Used by one thread."""

    def __init__(self, connection: socket.socket, sealer: Sealer, staging: Staging, *, is_read: bool) -> None:
        """`is_read`: whether the receiver reads the staging memory; else all records follow their heads."""
        self._connection = connection
        self._sealer = sealer
        self._staging = staging
        self._is_read = is_read
        self._slots: deque[int] = deque()
        """Slots that the receiver has not read yet, in order."""

    def send(self, blocks: Sequence[Block] | StagedFrame) -> None:
        """Sends blocks, and gives their slot back in time. Raises OSError, and EOFError where the receiver has left."""
        if isinstance(blocks, StagedFrame):
            self._send_staged(blocks)
        elif not self._is_read:
            self._send_in_line(blocks)
        else:
            for batch in self._batches(blocks):
                while len(self._slots) >= MAX_SLOTS:
                    self._await_one()
                self._stage(batch)

    def end(self) -> None:
        """Says that nothing more comes, and waits until all slots are read."""
        self._connection.sendall(HEAD.pack(0, 0, IN_LINE))
        self.settle()

    def settle(self) -> None:
        """Waits until all slots are read."""
        while self._slots:
            self._await_one()

    def close(self) -> None:
        """Gives its slots back."""
        while self._slots:
            self._staging.give_back(self._slots.popleft())

    def _batches(self, blocks: Sequence[Block]) -> Iterator[list[Block]]:
        """Blocks that fit in a slot together."""
        batch: list[Block] = []
        num_bytes = 0
        for block in blocks:
            length = len(block[1]) + self._sealer.overhead + LINE_BYTES
            if batch and num_bytes + length > self._staging.slot_bytes:
                yield batch
                batch, num_bytes = [], 0
            batch.append(block)
            num_bytes += length
        if batch:
            yield batch

    def _stage(self, blocks: Sequence[Block]) -> None:
        """One frame in a slot, if they fit in one and one is free."""
        frame = self._staging.frame([(name, len(row)) for name, row in blocks], type(self._sealer))
        if frame is None:
            self._send_in_line(blocks)
            return
        for place, (_, row) in zip(frame.rows, blocks, strict=True):
            np.copyto(place, row)
        self._send_staged(frame)

    def _send_staged(self, frame: StagedFrame) -> None:
        self._slots.append(frame.slot)
        for name, record in zip(frame.names, frame.records, strict=True):
            self._sealer.seal_in_place(name, record.data)
        if self._is_read:
            while len(self._slots) > MAX_SLOTS:
                self._await_one()
            self._connection.sendall(_head(frame.places.lengths, frame.slot))
        else:
            parts: Record = [_head(frame.places.lengths, IN_LINE), *(record.data for record in frame.records)]
            for first in range(0, len(parts), _MAX_PARTS):
                _send_parts(self._connection, parts[first : first + _MAX_PARTS])
            self._staging.give_back(self._slots.pop())

    def _await_one(self) -> None:
        """The receiver has read the first slot."""
        received(self._connection, len(_FREE))
        self._staging.give_back(self._slots.popleft())

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


class FrameMemory:
    """Memory of one connection's frames: used again once no block of a frame is, since the system's pages cost as much
    as a digest.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def frame(self, num_bytes: int) -> NDArray[np.uint8]:
        """Uninitialized memory, which is free again once nothing refers to it."""
        large = next((index for index, one in enumerate(self._free) if one.size >= num_bytes), None)
        memory = lines_of(num_bytes) if large is None else self._free.pop(large)
        frame = memory[:num_bytes]
        weakref.finalize(frame, self._free.append, memory).atexit = False
        return frame


class FrameReceiver:
    """The receiving end of one connection. Used by one thread."""

    def __init__(
        self,
        connection: socket.socket,
        sealer: Sealer,
        names: Sequence[bytes],
        reader: Reader | None,
        stall_s: float,
    ) -> None:
        """`names` are those of the blocks in order; `reader` reads the sender's slots. `stall_s`: the longest wait."""
        self._connection = connection
        self._sealer = sealer
        self._names = names
        self._reader = reader
        self._stall_s = stall_s
        self._waiting = select.poll()
        self._waiting.register(connection, select.POLLIN)
        self._wakes_for = 1
        self._num_received = 0
        self._memory = FrameMemory()

    @property
    def is_complete(self) -> bool:
        """Whether all blocks have come."""
        return self._num_received == len(self._names)

    def next(self) -> list[Block] | None:
        """The next blocks; None at the end. Raises `WrongDigestError`, OSError, EOFError, or ValueError for a malformed
        message.
        """
        self._wake_for(1)
        count, num_bytes, slot = HEAD.unpack(received(self._connection, HEAD.size))
        if not count:
            return None
        names = self._names[self._num_received : self._num_received + count]
        if count > len(names) or num_bytes > LARGEST_FRAME:
            raise ValueError(f"a frame of {count} blocks and {num_bytes} bytes, where {len(names)} were expected")
        lengths = struct.unpack(f"<{count}I", received(self._connection, 4 * count))
        if sum(lengths) != num_bytes:
            raise ValueError("the lengths of a frame are not its own")
        places = Places.in_a_row(lengths) if slot == IN_LINE else Places.of(lengths, type(self._sealer))
        frame = self._memory.frame(places.num_bytes)
        if slot == IN_LINE:
            come = self._come(frame.data)
        elif self._reader is None:
            raise ValueError("a frame in a slot, where no memory is read")
        else:
            come = self._reader.read(slot, frame)
        self._num_received += count
        blocks = self._unsealed(names, places, frame.data, come)
        if slot != IN_LINE:
            self._connection.sendall(_FREE)
        return blocks

    def _come(self, memory: memoryview) -> Iterator[int]:
        """Fills this memory from the connection; says how many bytes are there, each time that there are more."""
        num_there = 0
        while (num_left := len(memory) - num_there) >= MIN_AWAITED:
            self._wake_for(min(WAKE_BYTES, num_left))
            self._waiting.poll(1e3 * self._stall_s)
            num_there += _checked(self._connection.recv_into(memory[num_there:], 0, socket.MSG_DONTWAIT))
            yield num_there
        self._wake_for(1)
        receive_into(self._connection, memory[num_there:])
        yield len(memory)

    def _wake_for(self, num_bytes: int) -> None:
        """From now on who waits is woken once so many bytes are there, or as many as the kernel keeps."""
        if num_bytes != self._wakes_for:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_for = num_bytes

    def _unsealed(self, names: Sequence[bytes], places: Places, frame: memoryview, come: Iterator[int]) -> list[Block]:
        """Each record once it has come, while a core's cache has it. `come`: bytes of the frame that are there."""
        blocks: list[Block] = []
        num_there = 0
        for name, first, length in zip(names, places.firsts, places.lengths, strict=True):
            while num_there < first + length:
                num_there = next(come)
            blocks.append((name, np.frombuffer(self._sealer.unseal(name, frame[first : first + length]), np.uint8)))
        return blocks


def received(connection: socket.socket, num_bytes: int) -> bytes:
    """This number of bytes. Raises OSError, and EOFError where the other side has closed the connection."""
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, left: memoryview) -> None:
    """Fills this memory. Raises like `received`."""
    while left:
        left = left[_checked(connection.recv_into(left, 0, socket.MSG_WAITALL)) :]


def _checked(count: int) -> int:
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
