"""Supervisor of a local cluster: runs it in a separate process, restarts it after a loss, ends it on a signal."""

import io
import os
import random
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Self

from holdfast.cluster.serve.life_starter import READY, start_life
from holdfast.cluster.serve.node_watch import MemoryWatch
from holdfast.cluster.serve.reaper import STOP_SIGNALS, adopt_orphans, kill_descendants, stop_signals
from holdfast.router.dispatch.circuit_breaker import Backoff

EXIT_LOST: Final = 75
"""Exit code of a cluster that was lost and may be started again: EX_TEMPFAIL of sysexits.h."""

EXIT_FAILED: Final = 1
"""Exit code of a command that has failed for a reason that may pass (`cluster/commands/cli.py`)."""

EXIT_INTERRUPTED: Final = 130
"""Exit code of a command that a signal has ended while no cluster ran, likewise."""

STOP_SLACK_S: Final = 30.0
"""Seconds that a cluster may take to end beyond the time its requests may take to finish."""

LOST: Final = (EXIT_LOST, *(128 + number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)))
"""Exit codes that a cluster does not choose by itself."""

MAX_PAUSE_S: Final = 30.0
"""Between two starts of a cluster that is lost again and again. A start takes the machine's cores for seconds."""


def supervise(
    starter: Sequence[str],
    line: str,
    stop_limit_s: float,
    say: Callable[[str], None],
    max_pause_s: float = MAX_PAUSE_S,
) -> int:
    """Runs a cluster until it ends by itself or a signal ends it. On the main thread.

    `starter` is the command line of a life starter. `line` is written to the standard input of each life. A life gets
    SIGINT and SIGTERM, SIGHUP as SIGTERM, and is killed with all its processes `stop_limit_s` after the
    first. A cluster that exits with `EXIT_LOST`, or is killed, is started again, as often as that happens: at once, and
    after pauses that grow up to `max_pause_s` where it does not last. Once it has been lost, a start that fails is
    repeated as well; the caller's mistake (`EXIT_USAGE`) never is. Returns the exit code.
    """
    adopt_orphans()
    backoff, watch = Backoff(max_pause_s=max_pause_s), MemoryWatch(say)
    may_restart = LOST
    with LifeStarter(starter) as lives, stop_signals() as news:
        while True:
            started_s = time.monotonic()
            code, was_ordered = _run_once(lives, line, stop_limit_s, news)
            kill_descendants(lives.pid)  # where the reaper itself was killed
            if was_ordered or code not in may_restart:
                return code
            may_restart = (*LOST, EXIT_FAILED)
            watch.look()
            if stops_within(pause_s(backoff, time.monotonic() - started_s, say), news):
                return EXIT_INTERRUPTED


def pause_s(
    backoff: Backoff, lasted_s: float, say: Callable[[str], None], draw: Callable[[], float] = random.random
) -> float:
    """Seconds to wait after a life of `lasted_s`. `draw` returns numbers in [0, 1)."""
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


class LifeStarter:
    """A process that starts lives (`life_starter.py`). A life starter that has ended is replaced for the next life."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.wait()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self, stdin: int, news: int) -> int:
        """The pid of a new life. Raises `OSError` where the starter ends, `KeyboardInterrupt` on a signal before it."""
        if self._control is None or self._process is None or self._process.poll() is not None:
            self._control, self._process = self._started()
            control = self._control.fileno()
            while control not in select.select([news, control], [], [])[0]:
                if set(os.read(news, 4096)).intersection(STOP_SIGNALS):
                    self._process.kill()
                    raise KeyboardInterrupt
            if self._control.recv(len(READY)) != READY:
                raise ConnectionResetError("the life starter has ended while it imported")
        return start_life(self._control, stdin)

    def _started(self) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
        ours, theirs = socket.socketpair()
        with theirs:
            return ours, subprocess.Popen(self._command, stdin=theirs.fileno(), process_group=0)


def _run_once(lives: LifeStarter, line: str, stop_limit_s: float, news: int) -> tuple[int, bool]:
    """The exit code of one life, and whether it was ordered to end."""
    read_end, write_end = os.pipe()
    with open(write_end, "wb", buffering=0) as stdin:
        try:
            pid = lives.start(read_end, news)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED, True
        except OSError:  # the starter has said why, or was killed
            return EXIT_FAILED, False
        finally:
            os.close(read_end)
        with suppress(BrokenPipeError):
            stdin.write(line.encode() + b"\n")
        return _wait(pid, stdin, stop_limit_s, news)


def _wait(pid: int, stdin: io.FileIO, stop_limit_s: float, news: int) -> tuple[int, bool]:
    """Waits for the end of a life, likewise."""
    end = os.pidfd_open(pid)
    kill_at_s: float | None = None
    try:
        while True:
            left_s = None if kill_at_s is None or stdin.closed else max(0.0, kill_at_s - time.monotonic())
            ready, _, _ = select.select([news, end], [], [], left_s)
            if end in ready:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                return (code if code >= 0 else 128 - code), kill_at_s is not None
            if not ready:
                stdin.close()  # which ends everything
                continue
            for number in set(os.read(news, 4096)).intersection(STOP_SIGNALS):
                kill_at_s = kill_at_s or time.monotonic() + stop_limit_s
                os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)
    finally:
        os.close(end)
