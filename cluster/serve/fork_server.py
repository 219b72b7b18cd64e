"""Fork server: a process that has imported what Ray's workers import, and forks one worker for each request.

    python -m holdfast.cluster.serve.fork_server SOCKET MODULE...

A worker that is forked is ready in tenths of a second of CPU time, where the imports of a new one take two to five.
`worker_launcher.py`, which the raylet starts in place of a worker, asks for it over the Unix socket `SOCKET`. A worker
ends with its launcher. Workers outlive a fork server that is killed. They end with one whose standard input has ended,
which means that its parent is gone.
"""

import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from holdfast.cluster.serve.kept_process import tables_folder
from holdfast.cluster.serve.life_starter import IMPORTED, import_for_forks

MAX_ASKING: Final = 64
"""Most launchers that have not sent their whole request; for one more the oldest is closed."""

MAX_REQUEST_BYTES: Final = 16 * 2**20

END_LIMIT_S: Final = 10.0
"""Seconds that a fork server may take to end its workers."""

NUM_STREAMS: Final = 3
"""Standard input, output and error, which come with a request."""

_STDIN: Final = 0  # file descriptor
_READ_BYTES: Final = 2**16
_SIZE: Final = struct.Struct("!I")
_CREDENTIALS: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """Request of a launcher: `argv[0]` is a Python file, which runs as `__main__`."""

    argv: Sequence[str]
    environment: dict[str, str]
    folder: str
    streams: tuple[int, ...]
    """Descriptors of standard input, output and error."""


class ForkServer:
    """Serves requests from one socket, on the main thread."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._asking: dict[socket.socket, _Asking] = {}
        """Launchers whose request is incomplete: a silent or slow launcher holds up no other."""
        self._pids: dict[socket.socket, int] = {}
        """The worker of each connected launcher."""

    def serve(self) -> WorkerRequest | None:
        """Forks workers until standard input is at its end, then ends all of them: None. In a worker: its request."""
        news, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for source in (self._listening, news, _STDIN):
            self._selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj == news:
                    os.read(news, 4096)
                    self._reap()
                elif key.fileobj == _STDIN:
                    self._kill(self._pids.values())
                    return None
                elif key.fileobj in self._asking:
                    if (request := self._read(key.fileobj)) is not None:
                        return request
                elif isinstance(key.fileobj, socket.socket):
                    self._lose(key.fileobj)

    def _accept(self) -> None:
        launcher, _ = self._listening.accept()
        launcher.setblocking(False)
        self._asking[launcher] = _Asking()
        self._selector.register(launcher, selectors.EVENT_READ)
        if len(self._asking) > MAX_ASKING or user_of(launcher) != os.getuid():
            self._refuse(next(iter(self._asking)) if len(self._asking) > MAX_ASKING else launcher)

    def _read(self, launcher: socket.socket) -> WorkerRequest | None:
        """Receives a launcher's request. Returns its request in the worker, None in the fork server."""
        try:
            request = self._asking[launcher].read(launcher)
        except BlockingIOError:
            return None
        except (OSError, ValueError, RecursionError):
            self._refuse(launcher)
            return None
        return None if request is None else self._fork(launcher, request)

    def _fork(self, launcher: socket.socket, request: WorkerRequest) -> WorkerRequest | None:
        try:
            pid = os.fork()
        except OSError:  # the launcher becomes a worker by itself
            self._refuse(launcher)
            return None
        if pid == 0:
            del self._asking[launcher]
            self._close_all()
            return request
        for stream in self._asking.pop(launcher).streams:
            os.close(stream)
        self._pids[launcher] = pid
        with suppress(OSError):
            launcher.sendall(_SIZE.pack(pid))
        return None

    def _refuse(self, launcher: socket.socket) -> None:
        for stream in self._asking.pop(launcher).streams:
            os.close(stream)
        self._selector.unregister(launcher)
        launcher.close()

    def _close_all(self) -> None:
        """Closes everything of the fork server's, in a new worker. What came with its own request stays."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close() if isinstance(key.fileobj, socket.socket) else os.close(key.fd)
        for stream in (stream for other in self._asking.values() for stream in other.streams):
            os.close(stream)
        self._selector.close()

    def _reap(self) -> None:
        """Tells launchers of the workers that have ended."""
        launchers = {pid: launcher for launcher, pid in self._pids.items()}
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if (launcher := launchers.get(ended[0])) is not None:
                    code = os.waitstatus_to_exitcode(ended[1])
                    with suppress(OSError):
                        launcher.sendall(_SIZE.pack(code if code >= 0 else 128 - code))
                    self._forget(launcher)

    def _lose(self, launcher: socket.socket) -> None:
        """A launcher says nothing after its request: it has ended."""
        if launcher in self._pids:  # not reaped in this turn
            self._kill([self._pids[launcher]])
            self._forget(launcher)

    def _forget(self, launcher: socket.socket) -> None:
        self._selector.unregister(launcher)
        del self._pids[launcher]
        launcher.close()

    def _kill(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def user_of(launcher: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(launcher.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


class _Asking:
    """State of a launcher's request while it is received."""

    def __init__(self) -> None:
        self.streams: list[int] = []
        self._received = bytearray()

    def read(self, launcher: socket.socket) -> WorkerRequest | None:
        """The request once it is whole. Raises `ValueError` and `OSError` where none comes."""
        part, streams, _, _ = socket.recv_fds(launcher, _READ_BYTES, NUM_STREAMS)
        self.streams += streams
        self._received += part
        if not part or len(self.streams) > NUM_STREAMS:
            raise ValueError("a launcher ended before its request, or has more streams than a worker")
        if len(self._received) < _SIZE.size:
            return None
        (size,) = _SIZE.unpack_from(self._received)
        if size > MAX_REQUEST_BYTES:
            raise ValueError(f"a request of {size} bytes")
        if len(self._received) < _SIZE.size + size:
            return None
        read = json.loads(self._received[_SIZE.size :])
        if not isinstance(read, dict) or read.keys() != {"argv", "environment", "folder"} or _is_gone(launcher):
            raise ValueError(f"no request: {read!r:.100}")
        return WorkerRequest(**read, streams=tuple(self.streams))


def _is_gone(launcher: socket.socket) -> bool:
    """Whether a launcher has given up, as `worker_launcher.py` does where no answer comes."""
    try:
        return not launcher.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False


def become_worker(request: WorkerRequest) -> None:
    """Turns this process, a fork, into what `python argv...` would be, and runs it.

    It leads a separate process group: at the end of a worker, the raylet kills the worker's group.
    """
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv = list(request.argv)
    sys.path[0] = os.path.dirname(request.argv[0])
    runpy.run_path(request.argv[0], run_name="__main__")


@contextmanager
def started_server(path: Path, modules: Iterable[str] = IMPORTED) -> Iterator[Path]:
    """Keeps a fork server that listens at `path` and imports its modules itself. Its workers end with the block."""
    command = [sys.executable, "-m", "holdfast.cluster.serve.fork_server", str(path), *modules]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)  # Ctrl-C is for this process alone
    assert process.stdin is not None
    try:
        yield path
    finally:
        process.stdin.close()
        process.wait()


@contextmanager
def forked_server() -> Iterator[Path]:
    """Keeps a fork server with this process's imports; this process must have one thread. Yields where it listens.

    The server is the child of the process that adopts this one's orphans, and reaps it where it is killed.
    """
    with tables_folder() as folder:
        path = folder / "forks"
        listening = _listen(path)
        is_over, over = os.pipe()
        read_end, tell = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(over)
            os.close(read_end)
            _fork_server(listening, is_over, tell)
        for ours in (is_over, tell):
            os.close(ours)
        listening.close()
        os.waitpid(between, 0)
        end = os.pidfd_open(int(os.read(read_end, 32)))
        os.close(read_end)
        try:
            yield path
        finally:
            os.close(over)
            select.select([end], [], [], END_LIMIT_S)
            os.close(end)


def _fork_server(listening: socket.socket, is_over: int, tell: int) -> NoReturn:
    """Starts the fork server from a process that ends at once: the fork server becomes an orphan, and reports its
    pid.
    """
    if os.fork():
        os._exit(0)
    os.setpgid(0, 0)  # Ctrl-C is not for it
    os.write(tell, str(os.getpid()).encode())
    os.close(tell)
    os.dup2(is_over, _STDIN)
    os.close(is_over)
    _run(listening)


def _run(listening: socket.socket) -> NoReturn:
    """Runs the fork server in a new process, and the worker in each fork."""
    code = 0
    try:
        if (request := ForkServer(listening).serve()) is not None:
            become_worker(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter says what it does not handle
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _listen(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(64)
    return listening


def main(arguments: Sequence[str]) -> None:
    """Listens before it imports: a launcher that connects meanwhile is served as soon as a worker can be forked."""
    path, *modules = arguments
    listening = _listen(Path(path))
    import_for_forks(modules)
    _run(listening)


if __name__ == "__main__":
    main(sys.argv[1:])
