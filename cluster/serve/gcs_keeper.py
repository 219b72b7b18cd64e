"""Keeper of a private Ray's GCS: starts it again when it has ended, and ends it when it answers no more.

Streams do not need the GCS. What dies while it is away is replaced once it is back.
"""

import logging
import os
import random
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from holdfast.cluster.serve.disk_guard import regular_looks
from holdfast.router.dispatch.circuit_breaker import Backoff
from holdfast.worker.replica.processes import ProcessId

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 5.0
SILENT_S: Final = 30.0
"""A GCS that answers nothing for so long hangs. On a busy machine it answers late; to end it costs no stream."""

MAX_PAUSE_S: Final = 5.0
"""Between two starts of a GCS that ends again and again."""


class Gcs(Protocol):
    """What is kept."""

    @property
    def gcs(self) -> subprocess.Popen[bytes]: ...

    def start_gcs(self) -> subprocess.Popen[bytes]: ...


@dataclass(slots=True)
class Silence:
    """Since when a GCS has not answered. Times are in seconds of any one clock."""

    answered_s: float
    limit_s: float = SILENT_S

    def note(self, has_answered: bool, now_s: float) -> bool:
        """Notes one look at it. True: it hangs, and is given as long again from now on."""
        if has_answered:
            self.answered_s = now_s
        hangs = now_s - self.answered_s >= self.limit_s
        if hangs:
            self.answered_s = now_s
        return hangs


@contextmanager
def kept_gcs(
    ray: Gcs,
    say: Callable[[str], None],
    answers: Callable[[], bool],
    *,
    look_every_s: float = LOOK_EVERY_S,
    silent_s: float = SILENT_S,
) -> Iterator[None]:
    """Keeps the GCS for as long as the block lasts, on threads of its own. `say` hears of each loss.

    `answers` asks the GCS something and says whether it has answered in a few seconds.
    """
    silence = Silence(time.monotonic(), silent_s)

    def look() -> None:
        asked = ray.gcs  # by the time that it has not answered, the next one may have started
        if silence.note(answers(), time.monotonic()):
            say(f"Ray's GCS has not answered for {silent_s:g} s and is ended")
            asked.kill()

    is_over, over = os.pipe()
    thread = threading.Thread(target=_keep, args=(ray, say, is_over), name="gcs-keeper", daemon=True)
    thread.start()
    try:
        with regular_looks(look, look_every_s, "gcs-look"):
            yield
    finally:
        os.close(over)
        thread.join()
        os.close(is_over)


def _keep(ray: Gcs, say: Callable[[str], None], is_over: int) -> None:
    """Starts the GCS again each time that it ends, until `is_over` can be read.

    The kernel ends a GCS with the *thread* that has started it (PR_SET_PDEATHSIG), so this one lasts whatever fails.
    """
    backoff = Backoff(max_pause_s=MAX_PAUSE_S)
    while True:
        started_s = time.monotonic()
        pause_s = MAX_PAUSE_S
        try:
            if _is_over_before_end_of(ray.gcs, is_over):
                return
            lasted_s = time.monotonic() - started_s
            backoff.note_fault(lasted_s)
            pause_s = backoff.pause_s(random.random())
            reason = f"{_reason(ray.gcs)} after {lasted_s:.1f} s"
            say(f"Ray's GCS has ended ({reason}); it restarts in {pause_s:.1f} s; streams continue")
        except Exception:  # no descriptors, or nobody who hears it
            logger.exception("the keeper of Ray's GCS has met an error")
        if select.select([is_over], [], [], pause_s)[0]:
            return
        if ray.gcs.poll() is None:  # nothing is known of its end
            continue
        try:
            ray.start_gcs()
        except Exception:  # no memory for a process, no descriptors: the next turn tries again
            logger.exception("Ray's GCS does not start")


def _is_over_before_end_of(process: subprocess.Popen[bytes], is_over: int) -> bool:
    try:
        end = os.pidfd_open(process.pid)
    except ProcessLookupError:  # someone has waited for it already
        return bool(select.select([is_over], [], [], 0.0)[0])
    try:
        ready, _, _ = select.select([is_over, end], [], [])
        return is_over in ready
    finally:
        os.close(end)


def _reason(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    return f"signal {-code}" if code < 0 else f"exit code {code}"


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
