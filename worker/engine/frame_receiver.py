"""The receiving end of a connection's frames (`block_frames.py`), and the memory that their blocks come into."""

import select
import socket
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.cache.sealing import Sealer, WrongDigestError
from holdfast.worker.engine.block_frames import FREE, HEAD, IN_LINE, LARGEST_FRAME, Block, checked, receive_into
from holdfast.worker.engine.staging import Places, Reader, lines_of
from holdfast.worker.executors.cpu.checked_rows import copy_checked

WAKE_BYTES: Final = 1 << 20
"""A receiver that waits for more is woken for so many: being woken for a few takes a third of its CPU time."""
MIN_AWAITED: Final = 1 << 16
"""Fewer bytes are waited for as they come."""
HEADS_BYTES: Final = 4096
"""Heads are read with what follows them in the stream, up to so much."""
KEPT_BYTES: Final = 32 << 20
"""Most bytes of frames' memory that are kept for the next frames."""
LEAST_FRAME_BYTES: Final = 1 << 20


class FrameMemory:
    """Memory of frames: used again once no block of a frame is, since the system's pages cost as much as a digest. Used
    by several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # memory may be given back at any place, as the garbage collector has it
        self._free: list[NDArray[np.uint8]] = []

    def frame(self, num_bytes: int) -> NDArray[np.uint8]:
        """Uninitialized memory, which is free again once nothing refers to it."""
        with self._lock:
            large = next((index for index, one in enumerate(self._free) if one.size >= num_bytes), None)
            memory = None if large is None else self._free.pop(large)
        if memory is None:
            memory = lines_of(max(num_bytes, LEAST_FRAME_BYTES))
        frame = np.frombuffer(memory.data[:num_bytes], np.uint8)  # what its parts refer to
        weakref.finalize(frame, self._give_back, memory).atexit = False
        return frame

    def _give_back(self, memory: NDArray[np.uint8]) -> None:
        with self._lock:
            if memory.size + sum(one.size for one in self._free) <= KEPT_BYTES:
                self._free.append(memory)


class FrameReceiver:
    """The receiving end of one connection. Used by one thread."""

    def __init__(
        self,
        connection: socket.socket,
        sealer: Sealer,
        names: Sequence[bytes],
        reader: Reader | None,
        memory: FrameMemory,
        stall_s: float,
    ) -> None:
        """`names` are those of the blocks in order; `reader` reads the sender's slots; frames come into `memory`.
        `stall_s`: the longest wait.
        """
        self._connection = connection
        self._sealer = sealer
        self._names = names
        self._reader = reader
        self._memory = memory
        self._stall_s = stall_s
        self._waiting = select.poll()
        self._waiting.register(connection, select.POLLIN)
        self._wakes_for = 1
        self._num_received = 0
        self._ahead = memoryview(b"")
        """Bytes that have come behind the last head."""

    @property
    def is_complete(self) -> bool:
        """Whether all blocks have come."""
        return self._num_received == len(self._names)

    def next(self) -> list[Block] | None:
        """The next blocks; None at the end. Raises `WrongDigestError`, OSError, EOFError, or ValueError for a malformed
        message.
        """
        count, num_bytes, slot = HEAD.unpack(self._next_bytes(HEAD.size))
        if not count:
            return None
        names = self._names[self._num_received : self._num_received + count]
        if count > len(names) or num_bytes > LARGEST_FRAME:
            raise ValueError(f"a frame of {count} blocks and {num_bytes} bytes, where {len(names)} were expected")
        lengths = struct.unpack(f"<{count}I", self._next_bytes(4 * count))
        if sum(lengths) != num_bytes:
            raise ValueError("the lengths of a frame are not its own")
        self._num_received += count
        if slot == IN_LINE:
            return self._from_line(names, lengths)
        blocks = self._from_slot(slot, names, lengths)
        self._connection.sendall(FREE)
        return blocks

    def _next_bytes(self, num_bytes: int) -> bytes:
        """The next bytes of heads; more may be read with them."""
        if len(self._ahead) < num_bytes:
            self._wake_for(1)
            data = bytearray(max(num_bytes, HEADS_BYTES))
            num_there = len(self._ahead)
            data[:num_there] = self._ahead
            while num_there < num_bytes:
                num_there += checked(self._connection.recv_into(memoryview(data)[num_there:]))
            self._ahead = memoryview(data)[:num_there]
        found, self._ahead = bytes(self._ahead[:num_bytes]), self._ahead[num_bytes:]
        return found

    def _from_slot(self, slot: int, names: Sequence[bytes], lengths: tuple[int, ...]) -> list[Block]:
        if self._reader is None:
            raise ValueError("a frame in a slot, where no memory is read")
        before, overhead = self._sealer.before, self._sealer.overhead
        if min(lengths) < overhead:
            raise WrongDigestError
        places = Places.of(lengths, before)
        source = self._reader.read(slot, places.num_bytes)
        frame = self._memory.frame(places.num_bytes)
        if (seeds := self._sealer.seeds(names)) is None:
            records = zip(names, places.records(source), places.records(frame), strict=True)
            return [self._block(name, record, into) for name, record, into in records]
        firsts, rows = [first + before for first in places.firsts], [length - overhead for length in lengths]
        if not copy_checked(source, frame, firsts, rows, seeds):
            raise WrongDigestError
        return [(name, frame[at : at + size]) for name, at, size in zip(names, firsts, rows, strict=True)]

    def _block(self, name: bytes, record: NDArray[np.uint8], into: NDArray[np.uint8]) -> Block:
        """A copy of a record, unsealed while a core's cache has it."""
        np.copyto(into, record)
        return name, np.frombuffer(self._sealer.unseal(name, into.data), np.uint8)

    def _from_line(self, names: Sequence[bytes], lengths: Sequence[int]) -> list[Block]:
        """Each record once it has come, while a core's cache has it."""
        frame = self._memory.frame(sum(lengths)).data
        come = self._come(frame)
        blocks: list[Block] = []
        num_there = first = 0
        for name, length in zip(names, lengths, strict=True):
            while num_there < first + length:
                num_there = next(come)
            blocks.append((name, np.frombuffer(self._sealer.unseal(name, frame[first : first + length]), np.uint8)))
            first += length
        return blocks

    def _come(self, memory: memoryview) -> Iterator[int]:
        """Fills this memory from the connection; says how many bytes are there, each time that there are more."""
        num_there = min(len(memory), len(self._ahead))
        memory[:num_there], self._ahead = self._ahead[:num_there], self._ahead[num_there:]
        yield num_there
        while (num_left := len(memory) - num_there) >= MIN_AWAITED:
            self._wake_for(min(WAKE_BYTES, num_left))
            self._waiting.poll(1e3 * self._stall_s)
            num_there += checked(self._connection.recv_into(memory[num_there:], 0, socket.MSG_DONTWAIT))
            yield num_there
        self._wake_for(1)
        receive_into(self._connection, memory[num_there:])
        yield len(memory)

    def _wake_for(self, num_bytes: int) -> None:
        """From now on who waits is woken once so many bytes are there, or as many as the kernel keeps."""
        if num_bytes != self._wakes_for:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_for = num_bytes
