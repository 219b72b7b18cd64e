"""Benchmark of transfers: blocks over a connection and through shared memory, beside a bare socket and a copy,
in turn.

    python -m benchmarks.block_transfers [--rounds 5] [--block-kib 360] [--mib 512] [--json FILE]

Both ends are threads of one process. Printed: bytes a second, and CPU seconds for each gigabyte of both ends together,
kernel included, with their ratios to the bare socket, and that of the throughput to the copy. On a busy machine the
clock says little; CPU time still tells what digests, copies and encryption cost.
"""

import argparse
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.cache.sealing import MAX_OVERHEAD
from holdfast.worker.engine.block_frames import Block
from holdfast.worker.engine.block_sockets import BlockReceiver, BlockServer, TransferKey
from holdfast.worker.engine.staging import SharedMemory, Way

PIECE_BYTES = 8 << 20
BUFFER_BYTES = 4 << 20


class Taken(NamedTuple):
    """Time that bytes took."""

    bytes_per_s: float
    cpu_s_per_gb: float
    """CPU time of both ends, kernel included."""


@contextmanager
def timed(num_bytes: int, found: list[Taken]) -> Iterator[None]:
    """Adds what these bytes take."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    yield
    took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    found.append(Taken(num_bytes / took_s, took_cpu_s / num_bytes * 1e9))


def bare(num_pieces: int, found: list[Taken]) -> None:
    """A socket takes pieces from another, into memory that was touched before."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = socket.create_connection(listener.getsockname())
        sink, _ = listener.accept()
    for end in (source, sink):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    sent, received = np.ones(PIECE_BYTES, np.uint8).data, np.ones(PIECE_BYTES, np.uint8).data
    with source, sink, timed(num_pieces * PIECE_BYTES, found):
        thread = threading.Thread(target=_send_all, args=(source, sent, num_pieces))
        thread.start()
        for _ in range(num_pieces):
            left = received
            while left:
                left = left[sink.recv_into(left) :]
        thread.join()


def _send_all(source: socket.socket, piece: memoryview, count: int) -> None:
    for _ in range(count):
        source.sendall(piece)


def blocks(
    rows: NDArray[np.uint8], num_pieces: int, found: list[Taken], *, is_encrypted: bool, way: Way | None = None
) -> None:
    """The same of blocks, with their digests, over the connection or as `way` brings them. A piece has these rows."""
    names = [b"k" + number.to_bytes(16, "little") for number in range(len(rows) * num_pieces)]
    room, over = threading.Event(), threading.Event()
    server = BlockServer("127.0.0.1", room.set, way, rows.shape[1] + MAX_OVERHEAD)
    key = TransferKey.fresh(is_encrypted=is_encrypted)
    received = 0

    def take(some: Sequence[Block]) -> bool:
        nonlocal received
        received += sum(len(row) for _, row in some)
        return True

    with timed(num_pieces * rows.nbytes, found):
        server.offer(key)
        BlockReceiver(("127.0.0.1", server.port), key, names, take, lambda _: over.set(), way).start()
        for number in range(num_pieces):
            while not server.has_room:
                room.wait()
                room.clear()
            server.send(key.transfer, list(zip(names[number * len(rows) :], rows, strict=False)))
        over.wait()
    server.close()
    assert received == num_pieces * rows.nbytes


def copied(num_pieces: int, found: list[Taken]) -> None:
    """Pieces from memory to memory, as through memory that two processes share."""
    source, target = np.ones(PIECE_BYTES, np.uint8), np.ones(PIECE_BYTES, np.uint8)
    with timed(num_pieces * PIECE_BYTES, found):
        for _ in range(num_pieces):
            np.copyto(target, source)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-kib", type=int, default=360)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    block_bytes = arguments.block_kib << 10
    num_pieces, per_piece = (arguments.mib << 20) // PIECE_BYTES, PIECE_BYTES // block_bytes
    rows = np.random.default_rng(1).integers(0, 256, (per_piece, block_bytes), dtype=np.uint8)
    shared = SharedMemory()
    ways: dict[str, Callable[[list[Taken]], None]] = {
        "bare socket": lambda found: bare(num_pieces, found),
        "blocks": lambda found: blocks(rows, num_pieces, found, is_encrypted=False),
        "blocks, encrypted": lambda found: blocks(rows, num_pieces, found, is_encrypted=True),
        "shared memory": lambda found: blocks(rows, num_pieces, found, is_encrypted=False, way=shared),
        "shared, encrypted": lambda found: blocks(rows, num_pieces, found, is_encrypted=True, way=shared),
        "copy in memory": lambda found: copied(num_pieces, found),
    }
    taken: dict[str, list[Taken]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            way(taken[name])
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
