"""Launcher: the program that the raylet starts in place of a Python worker. It has the worker forked, and has the same
lifetime.

    python worker_launcher.py [-s] [-S] SOCKET OPTIONS OF SETUP AND WORKER...

The launcher asks the fork server (`fork_server.py`) at the Unix socket `SOCKET`, ends when the worker does, with its
exit code, and the worker ends when the launcher does. If no fork server answers, or a worker needs another environment,
the launcher replaces itself with the program that the raylet would have started: Ray's `setup_worker.py`.
"""

import array
import json
import os
import select
import socket
import struct
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Final, NoReturn

CONTEXT: Final = "--serialized-runtime-env-context="
LANGUAGE: Final = "--language="
NO_ENVIRONMENT: Final = ("{}", "")

EXIT_UNKNOWN: Final = 1
"""Exit code of a worker whose fork server was lost: the worker's own code is unknown."""

ANSWER_LIMIT_S: Final = 30
"""Whole seconds that a fork server may take: half of the time that the raylet gives a worker until it registers."""

_SIZE: Final = struct.Struct("!I")
_TIME: Final = struct.Struct("ll")


def ray_file(*names: str) -> str:
    """Path of a file of Ray's, which is not imported."""
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    return os.path.join(os.path.dirname(spec.origin), *names)


def is_plain(options: list[str]) -> bool:
    """Whether a worker runs in Python, in the environment that all workers have."""
    contexts = [option.removeprefix(CONTEXT) for option in options if option.startswith(CONTEXT)]
    languages = [option.removeprefix(LANGUAGE) for option in options if option.startswith(LANGUAGE)]
    return all(context in NO_ENVIRONMENT for context in contexts) and all(one == "PYTHON" for one in languages)


def ask(path: str, argv: list[str]) -> tuple[socket.socket, int]:
    """The connection that stands for a new worker, and its pid. Raises `OSError` where no fork server answers, or none
    within `ANSWER_LIMIT_S`: it may be stopped.
    """
    connection = socket.socket(socket.AF_UNIX)
    for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # the kernel's: they hold for `connect` too
        connection.setsockopt(socket.SOL_SOCKET, limit, _TIME.pack(ANSWER_LIMIT_S, 0))
    connection.connect(path)
    request = json.dumps({"argv": argv, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    streams = array.array("i", (0, 1, 2))
    connection.sendmsg([_SIZE.pack(len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(request)
    answer = connection.recv(_SIZE.size, socket.MSG_WAITALL)
    if len(answer) != _SIZE.size:
        raise ConnectionResetError("the fork server ended before it had forked")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(0, 0))
    return connection, int(_SIZE.unpack(answer)[0])


def exchange_scores(pid: int) -> None:
    """Gives the worker the OOM score that the raylet has given this process, and takes the worker's: where memory runs
    out, the kernel would else end the small launcher first, and a router that serves with it.
    """
    own, other = "/proc/self/oom_score_adj", f"/proc/{pid}/oom_score_adj"
    with suppress(OSError):  # the kernel lowers no score below a container's own: then only the order is another
        scores = [_read(own), _read(other)]
        for path, score in zip((other, own), scores, strict=True):
            with open(path, "w") as file:
                file.write(score)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def stand_for(connection: socket.socket, pid: int) -> int:
    """Waits for the end of a worker, also where its fork server ends before. Returns the exit code."""
    exchange_scores(pid)
    with suppress(OSError):
        code = connection.recv(_SIZE.size, socket.MSG_WAITALL)
        if len(code) == _SIZE.size:
            return int(_SIZE.unpack(code)[0])
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    return EXIT_UNKNOWN


def main(arguments: list[str]) -> NoReturn:
    """Becomes the worker process that Ray's command line asks for. `arguments`: without the program's name."""
    flags = [word for word in arguments if word in ("-s", "-S")]
    path, *options = arguments[len(flags) :]
    worker = ray_file("_private", "workers", "default_worker.py")
    if is_plain(options):
        passed_on = [option for option in options if not option.startswith((CONTEXT, LANGUAGE))]
        with suppress(OSError):
            sys.exit(stand_for(*ask(path, [worker, *passed_on])))
    setup = ray_file("_private", "workers", "setup_worker.py")
    os.execv(sys.executable, [sys.executable, setup, *flags, worker, *options])


if __name__ == "__main__":
    main(sys.argv[1:])
