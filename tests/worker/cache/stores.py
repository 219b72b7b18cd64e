"""Block stores on a clock of their own, and rows that tell whether they are what was put."""

from hashlib import blake2b
from pathlib import Path

from holdfast.worker.cache.block_store import BlockStore
from holdfast.worker.cache.sealing import KeySealer, Sealer

MAX_BYTES = 16 << 20
ROW = 3000
KEYS = {"digests": None, "encrypted": bytes(range(32))}


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def name_of(number: int) -> bytes:
    return b"k" + blake2b(str(number).encode(), digest_size=16).digest()


def row_of(number: int, size: int = ROW) -> bytes:
    return (blake2b(str(number).encode()).digest() * (size // 64 + 1))[:size]


def opened(folder: Path, kind: bytes = b"kind", key: bytes | None = None, max_bytes: int = MAX_BYTES) -> BlockStore:
    return BlockStore(folder, max_bytes, kind, Sealer() if key is None else KeySealer(key), clock=Clock())


def put(store: BlockStore, numbers, size: int = ROW) -> int:
    return store.put([(name_of(number), memoryview(row_of(number, size))) for number in numbers])


def found(store: BlockStore, numbers, size: int = ROW) -> set[int]:
    """The numbers of those that are there, each as it was put."""
    rows = {number: store.get(name_of(number)) for number in numbers}
    assert all(row in (None, row_of(number, size)) for number, row in rows.items()), "a row is not what was put"
    return {number for number, row in rows.items() if row is not None}
