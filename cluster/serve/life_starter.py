"""Life starter: a process that has the imports of a cluster's host, and forks a new host for each life of it.

    python -m holdfast.cluster.serve.life_starter MODULE [MODULE...]

A cluster that is lost starts again without the imports, which take a busy machine half of the time of a start. The
supervisor asks over the Unix socket that is standard input, one message for each life. The answer is the pid of a
reaper (`reaper.py`), a child of the supervisor, which runs `main()` of the first module. The starter ends when its
socket is closed.

Its imports, and the fork server's, are made so that each fork is as good as a new interpreter: what Ray's import reads
from the environment is set before, and class ids are not drawn from a generator that forks would share (read in Ray
2.60).
"""

import importlib
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from holdfast.cluster.serve import reaper
from holdfast.cluster.serve.ray_internals import PROCESS_MODULES, draw_class_ids_from_the_kernel
from holdfast.worker.process_memory import loading

READY: Final = b"\n"
"""The first byte of a starter that has imported all."""

_STDIN: Final = 0  # file descriptor
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
    """Runs in a process that ends at once, so that its child becomes a child of the supervisor, which adopts
    orphans.
    """
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
    """Imports the modules, reports that, and serves."""
    control = socket.socket(fileno=os.dup(_STDIN))
    import_for_forks(arguments)
    control.sendall(READY)
    _serve(control, sys.modules[arguments[0]].main)


IMPORTED: Final = (
    *PROCESS_MODULES,
    "holdfast.cluster.serve.serving",
    "holdfast.cluster.serve.directory",
    "holdfast.cluster.serve.router_deployment",
    "holdfast.cluster.serve.replica_deployment",
    "holdfast.worker.replica.rank",
    "torch",
)
"""Modules that the processes of a cluster import. None of them starts a thread or opens a connection."""

NO_JOB: Final = "ffffffff"
"""A worker of no job belongs to that of its first task, as one does that Ray starts ahead of need."""


def import_for_forks(modules: Iterable[str]) -> None:
    """Imports in a new process, which is the parent of its forks. A worker of Ray ends with the parent of this
    process.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else NumPy starts threads when it is imported
    os.environ["RAY_JOB_ID"], os.environ["RAY_RAYLET_PID"] = NO_JOB, str(os.getppid())  # Ray reads them once
    os.environ["RAY_AUTH_MODE"] = "token"  # as well: a fork that reads the mode later would present no token
    with loading():  # imported objects stay shared: a collection would write to each of them
        for name in modules:
            if name.startswith(("ray.", "holdfast.cluster.")):
                draw_class_ids_from_the_kernel()
            importlib.import_module(name)


if __name__ == "__main__":
    main(sys.argv[1:])
