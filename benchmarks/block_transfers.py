"""Benchmark of transfers: blocks over a connection and through shared memory, beside a bare socket and a copy,
in turn.

    python -m benchmarks.block_transfers [--rounds 5] [--block-kib 360] [--mib 512] [--json FILE]

The two ends are two processes, as replicas are. All bytes are sent once, from memory that no core's cache has, as the
blocks of a large cache are, which are copied out of it as between two steps. Printed: bytes a second, and CPU seconds
for each gigabyte of both ends together, kernel included, with their ratios to the bare socket, and that of the
throughput to the copy of as much memory. On a busy machine the clock says little; CPU time still tells what digests,
copies and encryption cost.
"""

import argparse
import json
import multiprocessing
import os
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.engine.block_frames import Block
from holdfast.worker.engine.block_mover import BlockMover
from holdfast.worker.engine.block_receiver import BlockReceiver
from holdfast.worker.engine.block_sockets import BlockServer
from holdfast.worker.engine.frame_receiver import FrameMemory
from holdfast.worker.engine.incoming_blocks import Taker
from holdfast.worker.engine.staging import SharedMemory, Way
from holdfast.worker.engine.tier_mover import KV, MoverEvents
from holdfast.worker.engine.transfer_key import TransferKey
from holdfast.worker.executors.cpu.block_bytes import BlockBytes
from holdfast.worker.executors.cpu.library import load_library

PIECE_BYTES = 8 << 20
LAYERS = 30
"""Of the cache: a block lies in as many pieces."""
LOOPBACK = "127.0.0.1"
WAY = SharedMemory()
MEMORY = FrameMemory()
"""As a replica has them from its start."""


class Taken(NamedTuple):
    """Time that bytes took."""

    bytes_per_s: float
    cpu_s_per_gb: float
    """CPU time of both ends, kernel included."""


class Receiver:
    """The other end: a process that carries out one order at a time, and answers with the CPU time that it took."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, there = context.Pipe()
        self._process = context.Process(target=_obey, args=(there,), daemon=True)
        self._process.start()

    @contextmanager
    def receives(self, num_bytes: int, found: list[Taken], order: Callable[..., None], *given: Any) -> Iterator[None]:
        """Adds what these bytes take, from this order to its end."""
        self._orders.send((order, given))
        self._orders.recv()  # it has begun
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        yield
        there_s: float = self._orders.recv()
        took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s + there_s
        found.append(Taken(num_bytes / took_s, took_cpu_s / num_bytes * 1e9))

    def close(self) -> None:
        self._orders.send(None)
        self._process.join()


def _obey(orders: Connection) -> None:
    while (asked := orders.recv()) is not None:
        order, given = asked
        orders.send(True)
        began_cpu_s = time.process_time()
        order(*given)
        orders.send(time.process_time() - began_cpu_s)


def bare(memory: NDArray[np.uint8], receiver: Receiver, found: list[Taken]) -> None:
    """A socket takes pieces from another, into memory that was touched before."""
    with (
        socket.create_server((LOOPBACK, 0)) as listener,
        receiver.receives(memory.size, found, _take_bare, listener.getsockname(), memory.size),
    ):
        source, _ = listener.accept()
        with source:
            for first in range(0, memory.size, PIECE_BYTES):
                source.sendall(memory[first : first + PIECE_BYTES].data)


def _take_bare(address: tuple[str, int], num_bytes: int) -> None:
    piece = np.ones(PIECE_BYTES, np.uint8).data
    with socket.create_connection(address) as sink:
        while num_bytes:
            left = piece[:num_bytes]
            while left:
                count = sink.recv_into(left)
                num_bytes -= count
                left = left[count:]


class BlockSender:
    """The same of blocks of a cache, which are copied out of it, with their digests, over the connection or as `way`
    brings them. Its memory for blocks on their way is there from the first round on, as a replica's is.
    """

    def __init__(self, memory: NDArray[np.uint8], block_bytes: int, *, is_encrypted: bool, way: Way | None) -> None:
        self._names = [KV + number.to_bytes(16, "little") for number in range(memory.size // block_bytes)]
        layers = memory[: len(self._names) * block_bytes].reshape(LAYERS, len(self._names), -1)
        self._num_bytes, self._per_piece = layers.nbytes, PIECE_BYTES // block_bytes
        self._is_encrypted, self._is_shared = is_encrypted, way is not None
        self._room, self._num_sent = threading.Event(), 0
        self._mover = BlockMover(None, {KV: BlockBytes(list(layers), load_library())}, way)
        self._mover.start(MoverEvents(_nothing, _nothing, self._room.set, _nothing))

    def send(self, receiver: Receiver, found: list[Taken]) -> None:
        outgoing, names = self._mover.outgoing, self._names
        self._num_sent += 1
        number, key = self._num_sent, TransferKey.fresh(is_encrypted=self._is_encrypted)
        port = outgoing.listen(LOOPBACK)
        outgoing.offer(number, [Taker(key)])
        num_bytes = self._num_bytes
        with receiver.receives(num_bytes, found, _take_blocks, port, key, names, num_bytes, self._is_shared):
            for first in range(0, len(names), self._per_piece):
                while not outgoing.has_room(number):
                    self._room.wait()
                    self._room.clear()
                blocks = range(first, min(first + self._per_piece, len(names)))
                outgoing.send(number, [(names[block], block) for block in blocks])
        outgoing.send(number, ())

    def close(self) -> None:
        self._mover.close()


def rows_alone(memory: NDArray[np.uint8], receiver: Receiver, found: list[Taken], block_bytes: int) -> None:
    """The same over the connection, of rows that were copied before."""
    rows = memory[: memory.size // block_bytes * block_bytes].reshape(-1, block_bytes)
    names = [KV + number.to_bytes(16, "little") for number in range(len(rows))]
    room, per_piece = threading.Event(), PIECE_BYTES // block_bytes
    server, key = BlockServer(LOOPBACK, room.set), TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    with receiver.receives(rows.nbytes, found, _take_blocks, server.port, key, names, rows.nbytes, False):
        for first in range(0, len(rows), per_piece):
            while not server.has_room:
                room.wait()
                room.clear()
            some = slice(first, first + per_piece)
            server.send(key.transfer, list(zip(names[some], rows[some], strict=True)))
    server.close()


def _nothing(*_: object) -> None:
    """A leader's mover tells its engine."""


def _take_blocks(port: int, key: TransferKey, names: Sequence[bytes], num_bytes: int, is_shared: bool) -> None:
    received, ends = 0, queue.SimpleQueue[Exception | None]()

    def take(some: Sequence[Block]) -> bool:
        nonlocal received
        received += sum(len(row) for _, row in some)
        return True

    way = WAY if is_shared else None
    BlockReceiver((LOOPBACK, port), TransferKey(*key), names, take, ends.put, way, MEMORY).start()
    if (error := ends.get()) is not None:
        raise error
    assert received == num_bytes, "all have come"


def copied(memory: NDArray[np.uint8], target: NDArray[np.uint8], found: list[Taken]) -> None:
    """From memory to memory, in one process."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    for first in range(0, memory.size, target.size):
        np.copyto(target, memory[first : first + target.size])
    took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    found.append(Taken(memory.size / took_s, took_cpu_s / memory.size * 1e9))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-kib", type=int, default=360)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    memory = np.random.default_rng(1).integers(0, 256, arguments.mib << 20, dtype=np.uint8)
    targets = {"copy in memory": np.ones_like(memory), "copy into a cache": np.ones(1 << 20, np.uint8)}
    receiver, size, shared = Receiver(), arguments.block_kib << 10, WAY

    senders: list[BlockSender] = []

    def of_blocks(*, is_encrypted: bool, way: Way | None = None) -> Callable[[list[Taken]], None]:
        senders.append(BlockSender(memory, size, is_encrypted=is_encrypted, way=way))
        return partial(senders[-1].send, receiver)

    ways: dict[str, Callable[[list[Taken]], None]] = {
        "bare socket": lambda found: bare(memory, receiver, found),
        "rows alone": lambda found: rows_alone(memory, receiver, found, size),
        "blocks": of_blocks(is_encrypted=False),
        "blocks, encrypted": of_blocks(is_encrypted=True),
        "shared memory": of_blocks(is_encrypted=False, way=shared),
        "shared, encrypted": of_blocks(is_encrypted=True, way=shared),
        "copy in memory": lambda found: copied(memory, targets["copy in memory"], found),
        "copy into a cache": lambda found: copied(memory, targets["copy into a cache"], found),
    }
    taken: dict[str, list[Taken]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            way(taken[name])
    for sender in senders:
        sender.close()
    receiver.close()
    show(taken, arguments.json)


def show(taken: Mapping[str, Sequence[Taken]], path: Path | None) -> None:
    """Medians of the rounds, and the medians of their ratios to the bare socket and the copy in the same round."""
    found = {}
    for name, rounds in taken.items():
        socket_rounds, copy_rounds = taken["bare socket"], taken["copy in memory"]
        found[name] = {
            "bytes_per_s": statistics.median(one.bytes_per_s for one in rounds),
            "of_socket": ratio([one.bytes_per_s for one in rounds], [one.bytes_per_s for one in socket_rounds]),
            "of_copy": ratio([one.bytes_per_s for one in rounds], [one.bytes_per_s for one in copy_rounds]),
            "cpu_s_per_gb": statistics.median(one.cpu_s_per_gb for one in rounds),
            "cpu_ratio": ratio([one.cpu_s_per_gb for one in socket_rounds], [one.cpu_s_per_gb for one in rounds]),
        }
        row = found[name]
        print(
            f"{name:18} {row['bytes_per_s'] / 1e9:6.2f} GB/s, of the socket {row['of_socket']:5.2f}, of the copy "
            f"{row['of_copy']:5.2f}; {row['cpu_s_per_gb']:6.3f} CPU s/GB, the socket's / it {row['cpu_ratio']:5.2f}"
        )
    if path:
        path.write_text(json.dumps({"load": os.getloadavg(), "ways": found}, indent=1))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
