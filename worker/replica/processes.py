"""Process identity: a pid with its start time, because a pid alone may belong to another process by the time of use;
and the standard streams of this process. A hang supervisor loads this file, and has to start fast.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

_PF_FORKNOEXEC: Final = 0x40
"""The kernel's include/linux/sched.h."""


class ProcessId(NamedTuple):
    """One process of this machine. No other process has the same value until the machine restarts."""

    pid: int
    start_ticks: int
    """Clock ticks from the machine's start to its own: field 22 of /proc/PID/stat, see proc(5)."""

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        """Raises `ProcessLookupError` if there is no such process."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields_from_3 = file.read().rpartition(b")")[2].split()  # field 2, the name, may hold anything
        except FileNotFoundError as error:
            raise ProcessLookupError(f"there is no process {pid}") from error
        return cls(pid, int(fields_from_3[22 - 3]))

    @classmethod
    def parse(cls, text: str) -> "ProcessId":
        """The opposite of `str`."""
        pid, start_ticks = text.split(":")
        return cls(int(pid), int(start_ticks))

    def __str__(self) -> str:
        return f"{self.pid}:{self.start_ticks}"

    @property
    def is_alive(self) -> bool:
        """Whether that process runs, and not another one with the same pid."""
        try:
            return ProcessId.of(self.pid) == self
        except ProcessLookupError:
            return False

    def open(self) -> int:
        """A descriptor of it that becomes readable when it ends. Raises `ProcessLookupError` if it is gone."""
        descriptor = os.pidfd_open(self.pid)
        try:
            if ProcessId.of(self.pid) == self:
                return descriptor
            raise ProcessLookupError(f"{self.pid} is another process by now")
        except ProcessLookupError:
            os.close(descriptor)
            raise

    def kill(self) -> None:
        """SIGKILL to it, and never to another. Raises `ProcessLookupError` if it is gone."""
        descriptor = self.open()
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def is_forked() -> bool:
    """Whether this process was forked and runs no new program: it has its parent's memory and none of its threads."""
    with open("/proc/self/stat", "rb") as file:
        flags = int(file.read().rpartition(b")")[2].split()[9 - 3])  # see proc(5)
    return bool(flags & _PF_FORKNOEXEC)


logger = logging.getLogger(__name__)

_PROC: Final = Path("/proc")


class OomScore(IntEnum):
    """Scores in thousandths of the limit; the kernel adds them to the memory of a process. A replica that loads keeps
    1000.
    """

    SERVING_REPLICA = 700
    """Score of a serving replica: its streams continue at another replica."""
    ROUTER = 300
    """Score of a router: its clients have to find another router. The directory has this score as well."""


def lower_oom_score(score: OomScore, processes: Iterable[ProcessId], proc: Path = _PROC) -> None:
    """Lowers the score of processes of this user on this machine. The kernel refuses a value below the one that a
    privileged process set last (a container's runtime does): then the score stays as it is, which affects only the
    order.
    """
    for process in processes:
        file = proc / str(process.pid) / "oom_score_adj"
        try:
            if int(file.read_text()) > score:
                file.write_text(str(int(score)))
        except (OSError, ValueError) as error:
            logger.debug("the OOM score of process %d stays as it is: %s", process.pid, error)


_NS: Final = 1e-9


class Times(NamedTuple):
    """Times of one thread since its start, in nanoseconds."""

    ran: int
    waited: int


class CoreWait:
    """Asked at regular times by one thread, which is left out itself."""

    def __init__(self, processes: Callable[[], Iterable[ProcessId]], proc: Path = _PROC) -> None:
        self._processes = processes
        self._proc = proc
        self._seen: dict[int, Times] = {}

    def since_last(self, passed_s: float) -> float:
        """Seconds, at most `passed_s`, that the thread which waited the longest has waited since the last call; 0 at
        the first. The kernel counts a wait when it is over: a thread that is ready and has not run waits still.
        """
        longest_s, seen = 0.0, {}
        for thread, times, is_ready in self._threads():
            seen[thread] = times
            if (before := self._seen.get(thread)) is not None:
                waits_still = is_ready and times.ran == before.ran
                longest_s = max(longest_s, passed_s if waits_still else (times.waited - before.waited) * _NS)
        self._seen = seen
        return min(longest_s, passed_s)

    def forget(self) -> None:
        """The next call is the first."""
        self._seen = {}

    def _threads(self) -> Iterator[tuple[int, Times, bool]]:
        own = threading.get_native_id()
        for process in self._processes():
            tasks = self._proc / str(process.pid) / "task"
            try:
                threads = [int(name.name) for name in tasks.iterdir()]
            except OSError:
                continue  # it has ended
            for thread in threads:
                if thread != own and (found := _times(tasks / str(thread))) is not None:
                    yield thread, *found


def _times(task: Path) -> tuple[Times, bool] | None:
    """And whether it is ready to run; None for a thread that has ended, or where the kernel keeps no such figures."""
    try:
        ran, waited, _ = map(int, (task / "schedstat").read_text().split())
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return None
    return Times(ran, waited), state == "R"


def open_standard_streams() -> None:
    """Opens `/dev/null` for standard streams that the parent has closed. The next socket would get their number, and
    libuv aborts a process that closes one of these.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
