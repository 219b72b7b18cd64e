"""Folder of the tables of a private Ray's GCS: in memory where there is room, for this user alone.

The tables hold the cluster's token, and whoever writes there runs code in the cluster. They are worth something for as
long as the process that has started the GCS lives. What may not live here: the GCS (`private_ray.py`).
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from holdfast.worker.supervision.process_id import ProcessId

IN_MEMORY: Final = Path("/dev/shm")
ROOM_BYTES: Final = 256 * 2**20
"""With less room than this in memory, the tables are on disk. They take 27 MB."""

_PREFIX: Final = "holdfast-gcs-"


@contextmanager
def tables_folder(in_memory: Path = IN_MEMORY, on_disk: Path | None = None) -> Iterator[Path]:
    """A new folder, which is removed after the block. Removes those of processes that have ended without doing so."""
    on_disk = Path(tempfile.gettempdir()) if on_disk is None else on_disk
    for base in (in_memory, on_disk):
        _clear(base)
    base = in_memory if _has_room(in_memory) else on_disk
    process = ProcessId.of(os.getpid())
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{process.pid}-{process.start_ticks}-", dir=base))  # mode 0700
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(base: Path) -> bool:
    try:
        return shutil.disk_usage(base).free >= ROOM_BYTES and os.access(base, os.W_OK)
    except OSError:
        return False


def _clear(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        pid, ticks, *_ = folder.name.removeprefix(_PREFIX).split("-")
        with suppress(OSError, ValueError):  # not of this user, or gone meanwhile
            if folder.stat().st_uid == os.getuid() and not _lives(ProcessId(int(pid), int(ticks))):
                shutil.rmtree(folder, ignore_errors=True)


def _lives(process: ProcessId) -> bool:
    try:
        return ProcessId.of(process.pid) == process
    except ProcessLookupError:
        return False
