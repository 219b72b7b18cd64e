"""Supervisor of a local cluster: runs it in a process of its own, starts it again when it is lost, ends it on a signal.

What may live here: that process, its signals, and when to give up. What may not: what the cluster is, and how it
notices that it is lost (`ray_watch.py`); ending what is left of it (`reaper.py`).
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from holdfast.cluster.serve.memory_watch import MemoryWatch
from holdfast.cluster.serve.reaper import adopt_orphans, kill_descendants
from holdfast.cluster.serve.stop_signals import STOP_SIGNALS, stop_signals
from holdfast.worker.errors import ReplicaError

EXIT_LOST: Final = 75
"""Exit code of a cluster that was lost and may be started again: EX_TEMPFAIL of sysexits.h."""

STOP_SLACK_S: Final = 30.0
"""How much longer than its requests may take to finish a cluster may take to end."""

LOST: Final = (EXIT_LOST, *(128 + number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)))
"""Exit codes that a cluster does not choose by itself."""

MAX_QUICK_LOSSES: Final = 3
QUICK_S: Final = 60.0


@dataclass(slots=True)
class RestartPolicy:
    """Counts losses that follow each other quickly: after `MAX_QUICK_LOSSES` of them in a row a restart is no help."""

    num_quick: int = 0

    def may_restart(self, lasted_s: float) -> bool:
        """Whether to start again a cluster that was lost after so long."""
        self.num_quick = self.num_quick + 1 if lasted_s < QUICK_S else 0
        return self.num_quick < MAX_QUICK_LOSSES


def supervise(command: Sequence[str], line: str, stop_limit_s: float, say: Callable[[str], None]) -> int:
    """Runs a cluster's command until it ends by itself or a signal ends it. On the main thread.

    `line` is written to its standard input. The command is told of SIGINT and SIGTERM, and killed with all its
    processes `stop_limit_s` after the first. One that exits with `EXIT_LOST`, or is killed, is started again. Returns
    the exit code; raises `ReplicaError` for a cluster that is lost again and again.
    """
    adopt_orphans()
    policy, watch = RestartPolicy(), MemoryWatch(say)
    with stop_signals() as news:
        while True:
            started_s = time.monotonic()
            code, was_told = _run_once(command, line, stop_limit_s, news)
            kill_descendants()  # where the reaper itself was killed
            if was_told or code not in LOST:
                return code
            lasted_s = time.monotonic() - started_s
            watch.look()
            if not policy.may_restart(lasted_s):
                raise ReplicaError(f"the cluster was lost {policy.num_quick} times in a row, within {QUICK_S:g} s each")
            say(f"the cluster was lost after {lasted_s:.0f} s; starting it again, at the same addresses")


def _run_once(command: Sequence[str], line: str, stop_limit_s: float, news: int) -> tuple[int, bool]:
    """The exit code of one life, and whether it was told to end."""
    reaper = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cluster.serve.reaper", *command], stdin=subprocess.PIPE, start_new_session=True
    )
    assert reaper.stdin is not None
    with suppress(BrokenPipeError):
        reaper.stdin.write(line.encode() + b"\n")
        reaper.stdin.flush()
    end = os.pidfd_open(reaper.pid)
    kill_at_s: float | None = None
    is_killed = False
    try:
        while True:
            left_s = None if kill_at_s is None or is_killed else max(0.0, kill_at_s - time.monotonic())
            ready, _, _ = select.select([news, end], [], [], left_s)
            if end in ready:
                code = reaper.wait()
                return (code if code >= 0 else 128 - code), kill_at_s is not None
            if not ready:
                is_killed = True
                reaper.stdin.close()  # which ends everything
                continue
            for number in set(os.read(news, 4096)).intersection(STOP_SIGNALS):
                kill_at_s = kill_at_s or time.monotonic() + stop_limit_s
                reaper.send_signal(number)
    finally:
        os.close(end)
        reaper.stdin.close()
