"""Reaper: a process that runs a life of a cluster in a fork, and ends every process that the life has started.

    python reaper.py --tied-to PARENT COMMAND...      # becomes a command that ends with its parent

Ray's processes outlive a driver that is killed, for up to a minute, and keep its ports. The reaper is their subreaper
(prctl(2)): whatever loses its parent becomes its child. It ends all of them with SIGKILL once the life has ended, or
once its own standard input is at its end, which means that the supervisor is gone. The first line of standard input is
the life's. SIGINT and SIGTERM are passed on to the life.

`stop_signals` gives signals as bytes of a pipe to code that waits for other things as well: an exception out of a
handler could strike inside of a lock and leave it broken.
"""

import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
PR_SET_CHILD_SUBREAPER: Final = 36  # <linux/prctl.h>
PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM)
_AT_START: Final[tuple[Any, ...]] = (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL)
"""Handlers that an interpreter has for `PASSED_ON` and SIGCHLD at its start."""

TIED_TO: Final = "--tied-to"
KILL_LIMIT_S: Final = 10.0
EXIT_FAILED: Final = 1
_STDIN: Final = 0  # file descriptor


def adopt_orphans() -> None:
    """Descendants that lose their parent become this process's children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """All processes below one, as of now."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, rest = [], [pid]
    while rest:
        below = children.get(rest.pop(), [])
        found += below
        rest += below
    return found


def kill_descendants(spared: int | None = None, limit_s: float = KILL_LIMIT_S) -> None:
    """SIGKILL to all descendants of this process except `spared`, until none is left. Needs `adopt_orphans` to miss
    none.
    """
    deadline_s = time.monotonic() + limit_s
    while (left := set(descendants(os.getpid())) - {spared}) and time.monotonic() < deadline_s:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):  # a grandchild, which becomes a child when its parent has ended
                os.waitpid(pid, 0)


def run(life: Callable[[], None]) -> int:
    """Runs it in a fork to its end. Returns its exit code; if a signal ended it, 128 plus the signal's number."""
    adopt_orphans()
    news, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    for number in (*PASSED_ON, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    child = _start(life, _first_line())
    try:
        while True:
            ready, _, _ = select.select([news, _STDIN], [], [])
            if news in ready and (code := _take(os.read(news, 4096), child)) is not None:
                return code
            if _STDIN in ready and not os.read(_STDIN, 4096):
                return 128 + signal.SIGKILL
    finally:
        kill_descendants()


def _take(signals: bytes, child: int) -> int | None:
    """Passes signals on, and reaps ended processes. Returns the exit code of the life, once it has one."""
    for number in signals:
        if number in PASSED_ON:
            with suppress(ProcessLookupError):
                os.kill(child, number)
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
    return None


def _start(life: Callable[[], None], line: bytes) -> int:
    read_end, write_end = os.pipe()
    reaper = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        _live(life, read_end, reaper)
    os.close(read_end)
    with open(write_end, "wb") as stdin:
        stdin.write(line)
    return child


def _live(life: Callable[[], None], stdin: int, reaper: int) -> None:
    """Runs a life in the new process, which ends when the reaper does."""
    signal.set_wakeup_fd(-1)
    for number, handler in zip((*PASSED_ON, signal.SIGCHLD), _AT_START, strict=True):
        signal.signal(number, handler)
    os.dup2(stdin, _STDIN)
    os.close(stdin)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != reaper:
        os._exit(EXIT_FAILED)
    code: object = 0
    try:
        life()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as the interpreter says what it does not handle
        traceback.print_exc()
        code = EXIT_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else EXIT_FAILED)


def become_tied(command: list[str], parent: int) -> None:
    """Turns this process into the command, which the kernel ends with the thread of `parent` that has started it: with
    the thread, also where its process goes on (prctl(2)).

    Returns only where that parent has ended already.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        os.execvp(command[0], command)


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and (piece := os.read(_STDIN, 1)):
        line += piece
    return line


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP: the terminal has gone. Where it is ignored, as below `nohup`, it stays so."""


@contextmanager
def stop_signals() -> Iterator[int]:
    """The read end of a pipe that receives one byte, the signal's number, for each signal within the block."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    earlier_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    taken = [number for number in STOP_SIGNALS if not _is_ignored(number)]
    earlier = {number: signal.signal(number, lambda *_: None) for number in taken}
    try:
        yield read_end
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(earlier_fd)
        os.close(read_end)
        os.close(write_end)


def _is_ignored(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


if __name__ == "__main__":
    assert sys.argv[1] == TIED_TO
    become_tied(sys.argv[3:], int(sys.argv[2]))
