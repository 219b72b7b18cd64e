"""Core wait of a group of processes: how long its threads were ready to run while other programs had the cores.

From /proc/PID/task/TID/schedstat (Linux, Documentation/scheduler/sched-stats.rst): time on a core and time in a run
queue, in nanoseconds. A stopped or blocked thread waits in no run queue.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.worker.supervision.process_id import ProcessId

_PROC: Final = Path("/proc")
_NS: Final = 1e-9


class Times(NamedTuple):
    """Of one thread since its start, in nanoseconds."""

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
