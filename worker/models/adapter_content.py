"""The content of an adapter's file: read piece by piece, by the thread that packs its matrices or by the one that
computes the digest, whichever needs the next piece first.
"""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Final

from holdfast.worker.adapter import DigestInWork, unreadable
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu.spare_memory import SpareMemory

_PIECE: Final = 2 << 20  # bytes read at a time


class AdapterContent:
    """Bytes of a file. Safe to use from any thread."""

    def __init__(self, given: str, path: Path, config: bytes, spare: SpareMemory, beside: ThreadPoolExecutor) -> None:
        """`given`: the adapter's name and folder, for errors; `config`: its other file; `beside`: a thread, which
        computes the digest of both. Raises `ConfigurationError`.
        """
        self._given, self._name, self._spare = given, path.name, spare
        self._lock = threading.Lock()
        self._num_there = 0
        self._failure: ConfigurationError | None = None
        self._is_refused = False
        try:
            self._file = FileIO(path)
            self._memory = spare.take(size := os.fstat(self._file.fileno()).st_size)
        except OSError as error:
            raise unreadable(given, error) from error
        self._bytes = memoryview(self._memory)[:size]
        self._digest: Future[str] = beside.submit(self._compute_digest, DigestInWork(config))

    def __len__(self) -> int:
        return len(self._bytes)

    def there(self, least: int) -> memoryview:
        """The bytes that have been read: at least this number, or all. Raises `ConfigurationError`."""
        least = min(least, len(self))
        while self._num_there < least:
            with self._lock:
                if self._num_there < least:
                    self._read_piece()
        return self._bytes[: self._num_there]

    @property
    def whole(self) -> memoryview:
        """All bytes."""
        return self.there(len(self))

    @property
    def digest(self) -> str:
        """Digest of both files. Waits for it."""
        return self._digest.result()

    def refuse(self) -> None:
        """Nobody wants its digest."""
        self._is_refused = True

    def let_go(self) -> None:
        """Nobody reads it any more: its memory may be used again. Waits for the digest."""
        self._digest.result()
        self._spare.give(self._memory)

    def _compute_digest(self, digest: DigestInWork) -> str:
        """Reads all of it first: whoever packs waits for pieces, and for the digest last."""
        with self._file:
            while self._num_there < len(self) and not self._is_refused:
                self.there(self._num_there + 1)
        if not self._is_refused:
            digest.add(self._bytes)
        return digest.text

    def _read_piece(self) -> None:
        if self._failure is not None:
            raise self._failure
        first = self._num_there
        try:
            count = self._file.readinto(self._bytes[first : first + _PIECE])
        except OSError as error:
            self._failure = unreadable(self._given, error)
            raise self._failure from error
        if not count:
            self._failure = ConfigurationError(f"{self._given}: {self._name} was cut short while it was read")
            raise self._failure
        self._num_there = first + count
