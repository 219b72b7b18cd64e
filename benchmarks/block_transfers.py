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
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from holdfast.worker.cache.sealing import MAX_OVERHEAD
from holdfast.worker.engine.block_frames import Block
from holdfast.worker.engine.block_sockets import BlockReceiver, BlockServer, TransferKey
from holdfast.worker.engine.staging import SharedMemory, Way

PIECE_BYTES = 8 << 20
BUFFER_BYTES = 4 << 20


def bare(num_bytes: int) -> float:
    """Bytes a second that a socket takes from another, into memory that was touched before, as blocks' is not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = socket.create_connection(listener.getsockname())
        sink, _ = listener.accept()
    for end in (source, sink):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    sent, received = np.ones(PIECE_BYTES, np.uint8).data, np.ones(PIECE_BYTES, np.uint8).data
    num_pieces = num_bytes // PIECE_BYTES
    with source, sink:
        began_s = time.monotonic()
        thread = threading.Thread(target=_send_all, args=(source, sent, num_pieces))
        thread.start()
        for _ in range(num_pieces):
            left = received
            while left:
                left = left[sink.recv_into(left) :]
        thread.join()
        return num_pieces * PIECE_BYTES / (time.monotonic() - began_s)


def _send_all(source: socket.socket, piece: memoryview, count: int) -> None:
    for _ in range(count):
        source.sendall(piece)


def blocks(num_bytes: int, block_bytes: int, *, is_encrypted: bool, way: Way | None = None) -> float:
    """The same of blocks, with their digests, over the connection or as `way` brings them."""
    per_piece = PIECE_BYTES // block_bytes
    num_pieces = num_bytes // PIECE_BYTES
    rows = np.random.default_rng(1).integers(0, 256, (per_piece, block_bytes), dtype=np.uint8)
    names = [b"k" + number.to_bytes(16, "little") for number in range(per_piece * num_pieces)]
    room, over = threading.Event(), threading.Event()
    server = BlockServer("127.0.0.1", room.set, way, block_bytes + MAX_OVERHEAD)
    key = TransferKey.fresh(is_encrypted=is_encrypted)
    received = 0

    def take(some: Sequence[Block]) -> bool:
        nonlocal received
        received += sum(len(row) for _, row in some)
        return True

    server.offer(key)
    receiver = BlockReceiver(("127.0.0.1", server.port), key, names, take, lambda _: over.set(), way)
    began_s = time.monotonic()
    receiver.start()
    for number in range(num_pieces):
        while not server.has_room:
            room.wait()
            room.clear()
        server.send(key.transfer, list(zip(names[number * per_piece :], rows, strict=False)))
    over.wait()
    took_s = time.monotonic() - began_s
    server.close()
    assert received == num_pieces * per_piece * block_bytes
    return received / took_s


def copied(num_bytes: int) -> float:
    """Bytes a second from memory to memory, as through memory that two processes share."""
    source, target = np.ones(PIECE_BYTES, np.uint8), np.ones(PIECE_BYTES, np.uint8)
    num_pieces = num_bytes // PIECE_BYTES
    began_s = time.monotonic()
    for _ in range(num_pieces):
        np.copyto(target, source)
    return num_pieces * PIECE_BYTES / (time.monotonic() - began_s)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-kib", type=int, default=360)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    num_bytes, block_bytes = arguments.mib << 20, arguments.block_kib << 10
    ways: dict[str, Callable[[], float]] = {
        "bare socket": lambda: bare(num_bytes),
        "blocks": lambda: blocks(num_bytes, block_bytes, is_encrypted=False),
        "blocks, encrypted": lambda: blocks(num_bytes, block_bytes, is_encrypted=True),
        "shared memory": lambda: blocks(num_bytes, block_bytes, is_encrypted=False, way=SharedMemory()),
        "shared, encrypted": lambda: blocks(num_bytes, block_bytes, is_encrypted=True, way=SharedMemory()),
        "copy in memory": lambda: copied(num_bytes),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            began_s = time.process_time()
            speeds[name].append(way())
            costs[name].append((time.process_time() - began_s) / num_bytes * 1e9)
    show(speeds, costs, arguments.json)


def show(speeds: dict[str, list[float]], costs: dict[str, list[float]], path: Path | None) -> None:
    """Medians of the rounds, and the medians of their ratios to the bare socket and the copy in the same round."""
    rows = {}
    for name in speeds:
        of_speeds = [own / base for own, base in zip(speeds[name], speeds["bare socket"], strict=True)]
        of_costs = [base / own for own, base in zip(costs[name], costs["bare socket"], strict=True)]
        of_copies = [own / base for own, base in zip(speeds[name], speeds["copy in memory"], strict=True)]
        speed, cost = statistics.median(speeds[name]), statistics.median(costs[name])
        ratio, cpu_ratio = statistics.median(of_speeds), statistics.median(of_costs)
        to_copy = statistics.median(of_copies)
        rows[name] = {
            "bytes_per_s": speed,
            "ratio": ratio,
            "to_copy": to_copy,
            "cpu_s_per_gb": cost,
            "cpu_ratio": cpu_ratio,
        }
        print(
            f"{name:18} {speed / 1e9:6.2f} GB/s {ratio:5.2f} {to_copy:5.2f} of the copy"
            f"   {cost:6.3f} CPU s/GB {cpu_ratio:5.2f}"
        )
    if path:
        path.write_text(json.dumps({"load": os.getloadavg(), "ways": rows}, indent=1))


if __name__ == "__main__":
    main()
