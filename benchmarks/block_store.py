"""Ways to keep blocks on a disk: the block store beside SQLite, LMDB (if it is installed), and files.

    python -m benchmarks.block_store [--blocks 400] [--kib 368] [--folder DIR]

Writes blocks in batches of 8, then reads all of them in random order. The store's own figures include its digests, or
its encryption; the others write and read alone. CPU times are the process's.
"""

import argparse
import os
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.worker.cache.block_store import BlockStore
from holdfast.worker.cache.sealing import KeySealer, Sealer

BATCH = 8
MAX_BYTES = 4 << 30


class Way(NamedTuple):
    """How blocks are put, [(name, row)] at a time, and got."""

    put: Callable[[Sequence[tuple[bytes, memoryview]]], object]
    get: Callable[[bytes], Any]


def stored(folder: Path, sealer: Sealer) -> Way:
    store = BlockStore(folder, MAX_BYTES, b"benchmark", sealer, clock=time.time)
    return Way(store.put, store.get)


def sqlite_blobs(folder: Path) -> Way:
    db = sqlite3.connect(folder / "blobs.sqlite", isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("CREATE TABLE blocks (name BLOB PRIMARY KEY, data BLOB)")

    def put(blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        db.execute("BEGIN")
        db.executemany("INSERT INTO blocks VALUES (?, ?)", blocks)
        db.execute("COMMIT")

    return Way(put, lambda name: db.execute("SELECT data FROM blocks WHERE name = ?", (name,)).fetchone()[0])


def lmdb(folder: Path) -> Way:
    import lmdb  # type: ignore[import-not-found,import-untyped,unused-ignore]

    env = lmdb.open(str(folder), map_size=MAX_BYTES, sync=False)

    def put(blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        with env.begin(write=True) as writing:
            for name, row in blocks:
                writing.put(name, bytes(row))

    def get(name: bytes) -> bytes:
        with env.begin() as reading:
            return bytes(reading.get(name))

    return Way(put, get)


def files(folder: Path) -> Way:
    def put(blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        for name, row in blocks:
            (folder / "new").write_bytes(row)
            (folder / "new").rename(folder / name.hex())

    return Way(put, lambda name: (folder / name.hex()).read_bytes())


def measure(way: Way, rows: Sequence[memoryview], names: Sequence[bytes]) -> tuple[float, float, float, float]:
    """MB/s and CPU ns a byte of writing, and of reading."""
    num_bytes = len(names) * len(rows[0])
    blocks = [(name, rows[number % len(rows)]) for number, name in enumerate(names)]
    figures: list[float] = []
    for work in (
        lambda: [way.put(blocks[first : first + BATCH]) for first in range(0, len(blocks), BATCH)],
        lambda: [way.get(name) for name in random.Random(0).sample(names, len(names))],
    ):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        work()
        figures += [
            num_bytes / (time.perf_counter() - began_s) / 1e6,
            (time.process_time() - began_cpu_s) / num_bytes * 1e9,
        ]
    return figures[0], figures[1], figures[2], figures[3]


def main() -> None:
    """Prints a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument("--kib", type=int, default=368, help="of a block; 368 are 16 tokens of SmolLM2-135M")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured; default: temporary")
    given = parser.parse_args()
    rows = [memoryview(os.urandom(given.kib << 10)) for _ in range(8)]
    names = [b"k" + blake2b(str(number).encode(), digest_size=16).digest() for number in range(given.blocks)]
    ways: dict[str, Callable[[Path], Way]] = {
        "block store": lambda folder: stored(folder, Sealer()),
        "block store, encrypted": lambda folder: stored(folder, KeySealer(bytes(32))),
        "SQLite blobs": sqlite_blobs,
        "a file each": files,
    }
    if find_spec("lmdb"):
        ways["LMDB, not synced"] = lmdb
    print(f"{'':24}{'write MB/s':>12}{'CPU ns/B':>10}{'read MB/s':>12}{'CPU ns/B':>10}")
    for name, make in ways.items():
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            wrote, wrote_ns, read, read_ns = measure(make(Path(folder)), rows, names)
        print(f"{name:24}{wrote:12.0f}{wrote_ns:10.2f}{read:12.0f}{read_ns:10.2f}")


if __name__ == "__main__":
    main()
