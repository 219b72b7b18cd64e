"""Process identity: a pid with its start time, because a pid alone may belong to another process by the time of use.

What may live here: the standard library's os and signal. A hang supervisor loads this file, and has to start fast.
"""

import os
import signal
from typing import Final, NamedTuple

_PF_FORKNOEXEC: Final = 0x40
"""The kernel's include/linux/sched.h."""


class ProcessId(NamedTuple):
    """One process of this machine. No other ever equals it, unless the machine is started anew."""

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
    """Whether this process was forked and runs no new program: it has another's memory and none of its threads."""
    with open("/proc/self/stat", "rb") as file:
        flags = int(file.read().rpartition(b")")[2].split()[9 - 3])  # see proc(5)
    return bool(flags & _PF_FORKNOEXEC)
