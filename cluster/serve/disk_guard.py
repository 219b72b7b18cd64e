"""Disk guard: says when the disk under Ray's session folder is nearly full, and keeps a file there to give up then.

On a full disk Ray starts no process: streams go on, but what dies is not replaced. What may live here: the limits, the
file, and reading the free space. What may not: who is told (deployments, `serving.py`).
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from holdfast.cluster.serve.regular_looks import regular_looks

LOW_BYTES: Final = 128 * 2**20
"""With less than this, a process that Ray starts may find no room for its logs and sockets."""

ENOUGH_BYTES: Final = 256 * 2**20
"""With this much, the file aside, the disk is taken to be mended."""

RESERVE_BYTES: Final = 64 * 2**20
"""What is given up: room for the logs of many processes that are started again."""

LOOK_EVERY_S: Final = 5.0

_NAME: Final = "holdfast.reserve"


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


class DiskGuard:
    """Of one folder. `look` is called from time to time, on one thread."""

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        *,
        reserve_bytes: int = 0,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """`say` hears of every change. With `reserve_bytes`, a file of that size is kept while there is room."""
        self._folder, self._say, self._free = folder, say, free
        self._reserve, self._reserve_bytes = folder / _NAME, reserve_bytes
        self.is_full = False

    def look(self) -> bool:
        """Whether the disk is full, as of now."""
        try:
            free = self._free(self._folder)
        except OSError as error:
            self._say(f"the free space of {self._folder} cannot be read: {error}")
            return self.is_full
        if not self.is_full and free < LOW_BYTES:
            self._fill(free)
        elif self.is_full and free >= ENOUGH_BYTES + self._reserve_bytes:
            self.is_full = False
            self._say(f"{self._folder} has room again: {_mib(free)} are free")
        if not self.is_full:
            self._keep_reserve(free)
        return self.is_full

    def close(self) -> None:
        """Deletes its file. Those who only look leave another's alone."""
        if not self._reserve_bytes:
            return
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def _fill(self, free: int) -> None:
        self.is_full = True
        has_reserve = self._reserve_bytes and self._reserve.exists()
        gives = f"; {_mib(self._reserve_bytes)} that were kept for this are given up" if has_reserve else ""
        self.close()
        self._say(
            f"the disk of {self._folder} is nearly full: {_mib(free)} are free{gives}. Streams go on, but without room "
            "Ray replaces nothing that ends: delete old sessions beside it, or what else fills the disk"
        )

    def _keep_reserve(self, free: int) -> None:
        if not self._reserve_bytes or self._reserve.exists() or free < ENOUGH_BYTES + self._reserve_bytes:
            return
        try:
            with open(self._reserve, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._reserve_bytes)
        except OSError:  # someone else was faster
            self.close()


@contextmanager
def guarded_disk(guard: DiskGuard) -> Iterator[None]:
    """Looks from a thread of its own for as long as the block lasts."""
    try:
        with regular_looks(guard.look, LOOK_EVERY_S, "disk-guard"):
            yield
    finally:
        guard.close()


def session_folder() -> Path:
    """Where Ray keeps the logs and sockets of this node's session. This process is connected to Ray."""
    import ray

    return Path(ray._private.worker._global_node.get_session_dir_path())


def _mib(number: int) -> str:
    return f"{number / 2**20:.0f} MiB"
