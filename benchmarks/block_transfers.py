"""Blocks from one process' socket to another, beside a bare socket: bytes a second over loopback, in turn.

python -m benchmarks.block_transfers [--rounds 5] [--block-kib 360] [--mib 512]
"""

import argparse
import socket
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np

from holdfast.worker.engine.block_sockets import Block, BlockReceiver, BlockServer, TransferKey

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


def blocks(num_bytes: int, block_bytes: int, *, is_encrypted: bool) -> float:
    """The same of blocks, with their digests."""
    per_piece = PIECE_BYTES // block_bytes
    num_pieces = num_bytes // PIECE_BYTES
    rows = np.random.default_rng(1).integers(0, 256, (per_piece, block_bytes), dtype=np.uint8)
    names = [b"k" + number.to_bytes(16, "little") for number in range(per_piece * num_pieces)]
    server, key, over = BlockServer("127.0.0.1"), TransferKey.fresh(is_encrypted=is_encrypted), threading.Event()
    received = 0

    def take(some: Sequence[Block]) -> bool:
        nonlocal received
        received += sum(len(row) for _, row in some)
        return True

    server.offer(key)
    receiver = BlockReceiver(("127.0.0.1", server.port), key, names, take, lambda _: over.set())
    began_s = time.monotonic()
    receiver.start()
    for number in range(num_pieces):
        while not server.has_room:
            time.sleep(0.0002)
        server.send(key.transfer, list(zip(names[number * per_piece :], rows, strict=False)))
    over.wait()
    took_s = time.monotonic() - began_s
    server.close()
    assert received == num_pieces * per_piece * block_bytes
    return received / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-kib", type=int, default=360)
    parser.add_argument("--mib", type=int, default=512)
    arguments = parser.parse_args()
    num_bytes, block_bytes = arguments.mib << 20, arguments.block_kib << 10
    speeds: dict[str, list[float]] = {"bare socket": [], "blocks": [], "blocks, encrypted": []}
    for _ in range(arguments.rounds):
        speeds["bare socket"].append(bare(num_bytes))
        speeds["blocks"].append(blocks(num_bytes, block_bytes, is_encrypted=False))
        speeds["blocks, encrypted"].append(blocks(num_bytes, block_bytes, is_encrypted=True))
    base = statistics.median(speeds["bare socket"])
    for name, found in speeds.items():
        median = statistics.median(found)
        print(f"{name:18} {median / 1e9:6.2f} GB/s  {median / base:5.2f}")


if __name__ == "__main__":
    main()
