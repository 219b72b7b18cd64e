"""Reaper: a process that runs a command, and when that has ended, ends every process that it has started.

    python -m holdfast.cluster.serve.reaper COMMAND...
    python reaper.py --tied-to PARENT COMMAND...      # becomes a command that ends with its parent

Ray's processes outlive a driver that is killed, for up to a minute, and keep its ports. The reaper is their subreaper
(prctl(2)): whatever loses its parent becomes its child. It ends all of them with SIGKILL once the command has ended, or
once its own standard input is at its end, which means that its parent is gone. The first line of standard input is the
command's. SIGINT and SIGTERM are passed on to the command. What may live here: the standard library, since this process
stays; what the command is, may not.
"""

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM)
TIED_TO: Final = "--tied-to"
KILL_LIMIT_S: Final = 10.0
_STDIN: Final = 0


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


def kill_descendants(limit_s: float = KILL_LIMIT_S) -> None:
    """SIGKILL to every process below this one, until there is none. Needs `adopt_orphans` to miss none."""
    deadline_s = time.monotonic() + limit_s
    while (left := descendants(os.getpid())) and time.monotonic() < deadline_s:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def run(command: list[str]) -> int:
    """Runs a command to its end. Returns its exit code; of one that a signal ended, 128 and the signal's number."""
    adopt_orphans()
    news, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    for number in (*PASSED_ON, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    child = _start(command, _first_line())
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
    """Passes signals on, and reaps what has ended. Returns the exit code of the command, once it has one."""
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


def _start(command: list[str], line: bytes) -> int:
    read_end, write_end = os.pipe()
    reaper = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, read_end, reaper)
    os.close(read_end)
    with open(write_end, "wb") as stdin:
        stdin.write(line)
    return child


def _become(command: list[str], stdin: int, reaper: int) -> None:
    """In the new process: the command, which ends when the reaper does."""
    try:
        for number in (*PASSED_ON, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(stdin, _STDIN)
        become_tied(command, reaper)
    finally:
        os._exit(127)


def become_tied(command: list[str], parent: int) -> None:
    """Turns this process into the command, which the kernel ends with the thread of `parent` that has started it.

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


if __name__ == "__main__":
    if sys.argv[1] == TIED_TO:
        become_tied(sys.argv[3:], int(sys.argv[2]))
    else:
        sys.exit(run(sys.argv[1:]))
