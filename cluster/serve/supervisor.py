"""Supervisor of a local cluster: runs it in a process of its own, starts it again when it is lost, ends it on a signal.

What may live here: that process, its signals, and when it starts again. What may not: what the cluster is, and how it
notices that it is lost (`ray_watch.py`); ending what is left of it (`reaper.py`).
"""

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from holdfast.cluster.serve.memory_watch import MemoryWatch
from holdfast.cluster.serve.reaper import adopt_orphans, kill_descendants
from holdfast.cluster.serve.stop_signals import STOP_SIGNALS, stop_signals
from holdfast.router.replicas.backoff import Backoff

EXIT_LOST: Final = 75
"""Exit code of a cluster that was lost and may be started again: EX_TEMPFAIL of sysexits.h."""

EXIT_FAILED: Final = 1
"""Exit code of a command that has failed for a reason that may pass (`cluster/commands/cli.py`)."""

EXIT_INTERRUPTED: Final = 130
"""Exit code of a command that a signal has ended while no cluster ran, likewise."""

STOP_SLACK_S: Final = 30.0
"""How much longer than its requests may take to finish a cluster may take to end."""

LOST: Final = (EXIT_LOST, *(128 + number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)))
"""Exit codes that a cluster does not choose by itself."""

MAX_PAUSE_S: Final = 30.0
"""Between two starts of a cluster that is lost again and again. A start takes the machine's cores for seconds."""


def supervise(
    command: Sequence[str],
    line: str,
    stop_limit_s: float,
    say: Callable[[str], None],
    max_pause_s: float = MAX_PAUSE_S,
) -> int:
    """Runs a cluster's command until it ends by itself or a signal ends it. On the main thread.

    `line` is written to its standard input. The command is told of SIGINT and SIGTERM, and killed with all its
    processes `stop_limit_s` after the first. One that exits with `EXIT_LOST`, or is killed, is started again, as often
    as that happens: at once, and after pauses that grow up to `max_pause_s` where it does not last. Once it has been
    lost, a start that fails is repeated as well; the caller's mistake (`EXIT_USAGE`) never is. Returns the exit code.
    """
    adopt_orphans()
    backoff, watch = Backoff(max_pause_s=max_pause_s), MemoryWatch(say)
    may_restart = LOST
    with stop_signals() as news:
        while True:
            started_s = time.monotonic()
            code, was_told = _run_once(command, line, stop_limit_s, news)
            kill_descendants()  # where the reaper itself was killed
            if was_told or code not in may_restart:
                return code
            may_restart = (*LOST, EXIT_FAILED)
            watch.look()
            if stops_within(pause_s(backoff, time.monotonic() - started_s, say), news):
                return EXIT_INTERRUPTED


def pause_s(
    backoff: Backoff, lasted_s: float, say: Callable[[str], None], draw: Callable[[], float] = random.random
) -> float:
    """How long to wait after a life of `lasted_s`. `draw` gives numbers in [0, 1)."""
    backoff.note_fault(lasted_s)
    found_s = backoff.pause_s(draw())
    times = "" if backoff.num_faults == 1 else f", the {backoff.num_faults}. time in a row"
    say(
        f"the cluster was lost after {lasted_s:.0f} s{times}; it starts again in {found_s:.1f} s, at the same addresses"
    )
    return found_s


def stops_within(limit_s: float, news: int) -> bool:
    """Waits that long, or until a signal comes that ends the command: True."""
    deadline_s = time.monotonic() + limit_s
    while select.select([news], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        if set(os.read(news, 4096)).intersection(STOP_SIGNALS):
            return True
    return False


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
