"""Node watch: probes of the disk under Ray's session folder, and of processes that were ended for want of memory.

On a full disk Ray starts no process: streams go on, but what dies is not replaced. A reserve file is given up then.
"""

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.worker.process_memory import oom_kills

logger = logging.getLogger(__name__)

LOW_BYTES: Final = 128 * 2**20
"""Least free disk at which a process that Ray starts surely finds room for its logs and sockets."""

ENOUGH_BYTES: Final = 256 * 2**20
"""Free disk, besides the reserve file, at which the disk counts as mended."""

RESERVE_BYTES: Final = 64 * 2**20
"""Size of the reserve file that is given up: room for the logs of many processes that are started again."""

LOOK_EVERY_S: Final = 5.0
"""Seconds between looks at the disk, and at processes ended for lack of memory."""

_NAME: Final = "holdfast.reserve"


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


class DiskGuard:
    """Guard of one folder's disk. `look` is called from time to time, on one thread."""

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
        """Deletes its file. Commands that only read leave the Ray of another process alone."""
        if not self._reserve_bytes:
            return
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def _fill(self, free: int) -> None:
        self.is_full = True
        has_reserve = self._reserve_bytes and self._reserve.exists()
        gives = f"; {_mib(self._reserve_bytes)} of reserve are freed" if has_reserve else ""
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


def _mib(number: int) -> str:
    return f"{number / 2**20:.0f} MiB"


ADVICE: Final = (
    "lower --replicas, --tp, --kv-cache-memory or --max-num-seqs, or serve a smaller model (`holdfast estimate` says "
    "what one needs)"
)


class MemoryWatch:
    """Counts from when it is made on. `look` is called from time to time, on one thread."""

    def __init__(
        self,
        say: Callable[[str], None],
        by_kernel: Callable[[], int] = oom_kills,
        by_ray: Callable[[], int] = lambda: 0,
    ) -> None:
        """`say` hears of every new one. `by_kernel` and `by_ray` count the processes that each has ended so far."""
        self._say = say
        self._counts = {"the kernel": by_kernel, "Ray's memory monitor": by_ray}
        self._seen = {name: count() for name, count in self._counts.items()}

    def look(self) -> None:
        """Reports the processes that have ended since the last look."""
        for name, count in self._counts.items():
            ended = count() - self._seen[name]
            if ended > 0:
                self._seen[name] += ended
                processes = "a process" if ended == 1 else f"{ended} processes"
                self._say(
                    f"out of memory: {name} has ended {processes} on this machine. Streams continue where there is "
                    f"another replica, and ended processes are restarted; {ADVICE}"
                )
