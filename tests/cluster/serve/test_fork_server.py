"""A fork server forks workers that are as those of a new interpreter, and that end when their launchers do."""

import errno
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from holdfast.cluster.serve import fork_server, worker_launcher
from holdfast.cluster.serve.fork_server import ForkServer, started_server
from holdfast.cluster.serve.worker_launcher import EXIT_UNKNOWN, ask, is_plain, stand_for

LIMIT_S = 60

WORKER = """
import json, os, sys, time
read = {"argv": sys.argv[1:], "value": os.environ.get("A_VALUE"), "folder": os.getcwd(), "name": __name__}
print(json.dumps({**read, "group": os.getpgid(0) == os.getpid(), "first": sys.path[0]}), flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
sys.exit(int(sys.argv[2]))
"""

LAUNCHER = """
import sys
from holdfast.cluster.serve.worker_launcher import ask, stand_for
sys.exit(stand_for(*ask(sys.argv[1], sys.argv[2:])))
"""


@pytest.fixture
def forks(tmp_path: Path):
    with started_server(tmp_path / "forks", modules=()) as path:
        wait_until_it_listens(path)
        yield path


def wait_until_it_listens(path: Path) -> None:
    """It listens before it serves."""
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return
        time.sleep(0.02)


@pytest.fixture
def worker(tmp_path: Path) -> str:
    (tmp_path / "worker.py").write_text(WORKER)
    return str(tmp_path / "worker.py")


def launch(forks: Path, *argv: str, **options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", LAUNCHER, str(forks), *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **options})


def test_a_worker_has_what_its_launcher_has_and_the_launcher_its_exit_code(forks: Path, worker: str):
    process = launch(forks, worker, "end", "7", A_VALUE="héllo")
    said, _ = process.communicate(timeout=LIMIT_S)
    assert json.loads(said) == {
        "argv": ["end", "7"],
        "value": "héllo",
        "folder": os.getcwd(),
        "name": "__main__",
        "group": True,
        "first": os.path.dirname(worker),
    }
    assert process.returncode == 7


SCORED_LAUNCHER = """
import sys
from pathlib import Path
from holdfast.cluster.serve.worker_launcher import ask, stand_for
Path("/proc/self/oom_score_adj").write_text("1000")
connection, pid = ask(sys.argv[1], sys.argv[2:])
print(pid, file=sys.stderr, flush=True)
sys.exit(stand_for(connection, pid))
"""


def test_the_score_that_the_raylet_gives_a_launcher_is_its_workers(forks: Path, worker: str):
    """When memory runs out, the worker may be ended, and not its launcher, which is small and ends the worker."""
    own = Path("/proc/self/oom_score_adj").read_text()
    command = [sys.executable, "-c", SCORED_LAUNCHER, str(forks), worker, "wait"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        scores = [Path(f"/proc/{pid}/oom_score_adj") for pid in (int(launcher.stderr.readline()), launcher.pid)]
        while [score.read_text() for score in scores] != ["1000\n", own]:
            assert launcher.poll() is None
            time.sleep(0.01)
        launcher.kill()


def test_a_worker_ends_with_its_launcher_and_others_stay(forks: Path, worker: str):
    first, first_pid = ask(str(forks), [worker, "wait"])
    second, second_pid = ask(str(forks), [worker, "wait"])
    ended = psutil.Process(first_pid)
    first.close()
    assert psutil.wait_procs([ended], timeout=LIMIT_S)[1] == []
    assert psutil.Process(second_pid).is_running()
    second.close()


def test_a_worker_that_is_killed_is_said_to_its_launcher(forks: Path, worker: str):
    connection, pid = ask(str(forks), [worker, "wait"])
    os.kill(pid, signal.SIGKILL)
    assert stand_for(connection, pid) == 128 + signal.SIGKILL


def test_workers_outlive_a_killed_fork_server_and_their_launchers_stand_for_them(forks: Path, worker: str):
    connection, pid = ask(str(forks), [worker, "wait"])
    process = psutil.Process(pid)
    server = process.parent()
    assert server is not None
    server.kill()
    codes: list[int] = []
    standing = threading.Thread(target=lambda: codes.append(stand_for(connection, pid)))
    standing.start()
    psutil.wait_procs([server], timeout=LIMIT_S)
    assert process.is_running()
    assert standing.is_alive()
    process.kill()
    standing.join(LIMIT_S)
    assert codes == [EXIT_UNKNOWN]


def test_workers_end_with_the_parent_of_their_fork_server(tmp_path: Path, worker: str):
    with started_server(tmp_path / "others", modules=()) as path:
        wait_until_it_listens(path)
        process = psutil.Process(ask(str(path), [worker, "wait"])[1])
    assert psutil.wait_procs([process], timeout=LIMIT_S)[1] == []


def test_what_is_no_request_ends_nothing(forks: Path, worker: str):
    """Nothing, half a size, half a request, no JSON, and no request."""
    for sent in (
        b"",
        b"\x00",
        struct.pack("!I", 5) + b"no",
        struct.pack("!I", 2) + b"no",
        struct.pack("!I", 2) + b"{}",
    ):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(forks))
            if sent:
                socket.send_fds(stranger, [sent], [0, 1, 2])
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    assert launch(forks, worker, "end", "3").wait(LIMIT_S) == 3


REQUEST = json.dumps({"argv": [], "environment": {}, "folder": "/"}).encode()


def test_strangers_hold_up_no_launcher(forks: Path, worker: str):
    """Silent ones, more than are kept; a byte of a size; half a request; one that is too long, too deep, or of another
    kind; more streams than a worker has; and one who asks and is gone before the answer.
    """
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(fork_server.MAX_ASKING + 8)]
    for stranger in strangers:
        stranger.connect(str(forks))
    half, size, large, deep, many, gone = strangers[-6:]
    socket.send_fds(half, [struct.pack("!I", len(REQUEST)) + REQUEST[:5]], [0, 1, 2])
    size.sendall(b"\0")
    large.sendall(struct.pack("!I", 2**32 - 1))
    deep.sendall(struct.pack("!I", 10**5) + b"[" * 10**5)
    for _ in range(2):
        socket.send_fds(many, [b"\0"], [0, 1, 2])
    socket.send_fds(gone, [struct.pack("!I", len(REQUEST)) + REQUEST], [0, 1, 2])
    gone.close()
    assert launch(forks, worker, "end", "3").wait(LIMIT_S) == 3
    for refused in (large, deep, many, strangers[0]):
        refused.settimeout(LIMIT_S)
        with suppress(ConnectionResetError):  # closed with bytes unread
            assert refused.recv(1) == b""
    for stranger in strangers:
        stranger.close()


def served_here(connection: socket.socket) -> ForkServer:
    """A fork server of this process with one launcher, which has sent nothing yet."""
    listening, _ = socket.socketpair(socket.AF_UNIX)
    monkey = SimpleNamespace(accept=lambda: (connection, None), fileno=listening.fileno)
    server = ForkServer(monkey)
    server._accept()
    return server


def test_other_users_get_no_worker(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with theirs:
        served_here(ours)
        assert theirs.recv(1) == b""


def test_a_launcher_is_told_at_once_where_no_process_can_be_forked(monkeypatch: pytest.MonkeyPatch):
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    ours, theirs = socket.socketpair(socket.AF_UNIX)
    monkeypatch.setattr("os.fork", fork)
    with theirs:
        server = served_here(ours)
        socket.send_fds(theirs, [struct.pack("!I", len(REQUEST)) + REQUEST], [0, 1, 2])
        assert server._read(ours) is None
        assert theirs.recv(1) == b""


def test_a_launcher_does_not_wait_for_ever_for_a_fork_server_that_is_stopped(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(worker_launcher, "ANSWER_LIMIT_S", 1)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "forks"))
        stopped.listen(0)
        for _ in range(2):  # the first is in the queue, the later one is not let in
            with pytest.raises(BlockingIOError):
                ask(str(tmp_path / "forks"), ["worker"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], True),
        (["--language=PYTHON", "--worker-id=ab"], True),
        (["--serialized-runtime-env-context={}", "--language=PYTHON"], True),
        (['--serialized-runtime-env-context={"env_vars": {"A": "1"}}', "--language=PYTHON"], False),
        (["--language=JAVA"], False),
    ],
)
def test_which_workers_are_plain(options: list[str], expected: bool):
    assert is_plain(options) == expected


def test_without_a_fork_server_a_launcher_becomes_what_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    became: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, argv: became.append(argv))
    worker_launcher.main([str(tmp_path / "nobody"), "--language=PYTHON", "--worker-id=ab"])
    setup, worker = (
        worker_launcher.ray_file("_private", "workers", f"{name}_worker.py") for name in ("setup", "default")
    )
    assert became == [[sys.executable, setup, worker, "--language=PYTHON", "--worker-id=ab"]]
    assert os.path.isfile(setup)
    assert os.path.isfile(worker)


IDS = """
import os, sys
from holdfast.cluster.serve.life_starter import IMPORTED, import_for_forks
import_for_forks(IMPORTED)
print(len(os.listdir("/proc/self/task")))
from ray import NodeID
for _ in range(3):
    sys.stdout.flush()
    if os.fork() == 0:
        print(NodeID.from_random().hex(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_the_imports_start_no_thread_and_forks_draw_numbers_of_their_own():
    said = subprocess.run([sys.executable, "-c", IDS], capture_output=True, text=True, timeout=240)
    assert said.returncode == 0, said.stderr
    threads, *ids = said.stdout.split()
    assert threads == "1", "a thread does not live on in a fork, and what it holds stays locked"
    assert len(set(ids)) == 3, "equal numbers are equal ids of tasks, which end Ray's processes"


FORKED = """
import os, sys
from holdfast.cluster.serve.fork_server import forked_server
from holdfast.cluster.serve.worker_launcher import ask, stand_for
with forked_server() as path:
    code = stand_for(*ask(str(path), [sys.argv[1], "end", "7"]))
    connection, pid = ask(str(path), [sys.argv[1], "wait"])
    print("forked", path, pid, code)
"""


def test_a_process_forks_a_fork_server_of_its_own_which_ends_with_its_workers(worker: str):
    said = subprocess.run([sys.executable, "-c", FORKED, worker], capture_output=True, text=True, timeout=LIMIT_S)
    assert said.returncode == 0, said.stderr
    ours = re.search(r"forked (\S+) (\d+) (\d+)\n", said.stdout)  # a worker writes there too, and ends in mid-line
    assert ours, said.stdout
    path, pid, code = ours.groups()
    assert code == "7"
    assert (
        psutil.wait_procs([psutil.Process(int(pid))] if psutil.pid_exists(int(pid)) else [], timeout=LIMIT_S)[1] == []
    )
    assert not Path(path).exists()
