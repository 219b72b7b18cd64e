"""Life starter: a process that has imported what a cluster's host imports, and forks a new host for each life of it.

    python -m holdfast.cluster.serve.life_starter MODULE [MODULE...]

A cluster that is lost starts again without the imports, which take a busy machine half of the time of a start. The
supervisor asks over the Unix socket that is standard input, one message for each life. The answer is the pid of a
reaper (`reaper.py`), a child of the supervisor, which runs `main()` of the first module. The starter ends when the
socket is at its end.
"""

import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.cluster.serve import reaper
from holdfast.cluster.serve.forkable_imports import import_for_forks

READY: Final = b"\n"
"""The first byte of a starter that has imported all."""

_STDIN: Final = 0
_PID: Final = struct.Struct("!I")
_MESSAGE_BYTES: Final = 1


def start_life(control: socket.socket, stdin: int) -> int:
    """The pid of a new life's reaper, whose standard input is `stdin`. Raises `OSError` where the starter has ended."""
    socket.send_fds(control, [b"1"], [stdin])
    answer = control.recv(_PID.size, socket.MSG_WAITALL)
    if len(answer) != _PID.size:
        raise ConnectionResetError("the life starter has ended")
    return int(_PID.unpack(answer)[0])


def _serve(control: socket.socket, life: Callable[[], None]) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 1)
        if not message:
            return
        (stdin,) = descriptors
        between = os.fork()
        if between == 0:
            _leave_to_supervisor(control, stdin, life)
        os.close(stdin)
        os.waitpid(between, 0)


def _leave_to_supervisor(control: socket.socket, stdin: int, life: Callable[[], None]) -> None:
    """In a process that ends at once, so that its child becomes the supervisor's, which adopts orphans."""
    os.setsid()
    pid = os.fork()
    if pid:
        control.sendall(_PID.pack(pid))
        os._exit(0)
    os.dup2(stdin, _STDIN)
    os.close(stdin)
    control.close()
    os._exit(reaper.run(life))


def main(arguments: Sequence[str]) -> None:
    """Imports, says so, and serves."""
    control = socket.socket(fileno=os.dup(_STDIN))
    import_for_forks(arguments)
    control.sendall(READY)
    _serve(control, sys.modules[arguments[0]].main)


if __name__ == "__main__":
    main(sys.argv[1:])
