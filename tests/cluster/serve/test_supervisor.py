"""A supervised command is started again when it is lost, obeys signals, and leaves no process behind."""

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from holdfast.cluster.serve import supervisor
from holdfast.cluster.serve.reaper import descendants, stop_signals
from holdfast.cluster.serve.supervisor import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_LOST
from holdfast.router.dispatch.circuit_breaker import FORGIVEN_S, Backoff

LIMIT_S = 60

LIFE = """
import os, signal, subprocess, sys
def main():
    began()
{rest}
def began():
    settings = sys.stdin.readline().strip()
    print("began", settings, os.getpid(), flush=True)
    # a process that nobody would end: of a session of its own, and its parent is gone
    sleeps = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    orphan = "import subprocess, sys; subprocess.Popen(" + sleeps + ", start_new_session=True)"
    subprocess.run([sys.executable, "-c", orphan])
    print("started", flush=True)
"""

SUPERVISED = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run below nohup
from holdfast.cluster.serve.supervisor import supervise
starter = [sys.executable, "-m", "holdfast.cluster.serve.life_starter", sys.argv[1]]
limit_s, max_pause_s = float(sys.argv[2]), float(sys.argv[3])
sys.exit(supervise(starter, "settings", limit_s, lambda text: print(text, flush=True), max_pause_s))
"""

WAIT = "signal.pause()"
OBEY = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('ready', flush=True); signal.pause()"
IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)\nwhile True: signal.pause()"


class Supervised:
    """A supervisor in a process of its own."""

    def __init__(self, folder: Path, rest: str, stop_limit_s: float = 60.0, max_pause_s: float = 0.01) -> None:
        (folder / "a_life.py").write_text(LIFE.format(rest=textwrap.indent(textwrap.dedent(rest), "    ")))
        arguments = [sys.executable, "-c", SUPERVISED, "a_life", str(stop_limit_s), str(max_pause_s)]
        project = Path(__file__).parents[3]
        path = os.pathsep.join([str(folder), str(project)])
        self.process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, text=True, cwd=project, env={**os.environ, "PYTHONPATH": path}
        )
        self.below: list[psutil.Process] = []

    def wait_for(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line
        raise AssertionError(f"it ended without {word!r}")

    def remember(self) -> None:
        """The processes of this moment, for `assert_nothing_is_left`."""
        self.below = [psutil.Process(pid) for pid in descendants(self.process.pid)]
        self.starter, *_ = psutil.Process(self.process.pid).children()

    def assert_nothing_is_left(self) -> None:
        self._assert_ended(self.below)

    def assert_nothing_is_left_of_the_life(self) -> None:
        self._assert_ended([process for process in self.below if process != self.starter])

    def _assert_ended(self, processes: list[psutil.Process]) -> None:
        _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
        assert processes
        assert alive == []


@pytest.fixture
def supervised(tmp_path: Path):
    started: list[Supervised] = []

    def start(rest: str, **options: float) -> Supervised:
        started.append(Supervised(tmp_path, rest, **options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        assert one.process.stdout is not None
        one.process.stdout.close()


def test_a_signal_reaches_the_command_whose_exit_code_counts(supervised):
    one = supervised(OBEY)
    assert one.wait_for("began").split()[1] == "settings"
    one.wait_for("ready")
    one.remember()
    one.process.terminate()
    assert one.process.wait(LIMIT_S) == 7
    one.assert_nothing_is_left()


def test_a_life_knows_which_process_a_user_has_started(supervised):
    one = supervised("from holdfast.cluster.serve.running import _serve_pid; print('serve', _serve_pid(), flush=True)")
    assert one.wait_for("serve").split()[1] == str(one.process.pid)


def test_where_the_terminal_goes_the_command_ends_in_order(supervised):
    one = supervised(OBEY)
    one.wait_for("ready")
    one.remember()
    one.process.send_signal(signal.SIGHUP)
    assert one.process.wait(LIMIT_S) == 7
    one.assert_nothing_is_left()


def test_below_nohup_a_terminal_that_goes_ends_nothing():
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_a_command_that_does_not_obey_is_killed_in_time(supervised):
    one = supervised(IGNORE, stop_limit_s=0.2)
    one.wait_for("ready")
    one.remember()
    one.process.terminate()
    assert one.process.wait(LIMIT_S) == 128 + signal.SIGKILL
    one.assert_nothing_is_left()


def test_a_killed_supervisor_leaves_nothing_behind(supervised):
    one = supervised(WAIT)
    one.wait_for("started")
    one.remember()
    one.process.kill()
    one.assert_nothing_is_left()


def test_a_killed_reaper_leaves_nothing_behind_and_the_command_is_started_again(supervised):
    one = supervised(WAIT)
    one.wait_for("started")
    one.remember()
    _, reaper = psutil.Process(one.process.pid).children()  # after the life starter
    reaper.kill()
    one.wait_for("the cluster was lost")
    one.assert_nothing_is_left_of_the_life()
    one.wait_for("started")


NUM_LOSSES = 6


def test_a_command_that_says_it_is_lost_is_started_again_each_time(supervised):
    one = supervised(f"sys.exit({EXIT_LOST})")
    for number in range(1, NUM_LOSSES):
        one.wait_for("started")
        line = one.wait_for("the cluster was lost")
        assert f"the {number}. time in a row" in line or number == 1
    one.process.terminate()
    assert one.process.wait(LIMIT_S) in (EXIT_INTERRUPTED, EXIT_LOST, 128 + signal.SIGTERM), "in a pause, or a life"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_pause_and_another_one_does_not(number: int):
    news, tell = os.pipe()
    try:
        os.write(tell, bytes([signal.SIGCHLD]))
        assert not supervisor.stops_within(0.01, news)
        os.write(tell, bytes([signal.SIGCHLD, number]))
        assert supervisor.stops_within(3600.0, news)
    finally:
        os.close(news)
        os.close(tell)


def test_pauses_grow_while_a_cluster_does_not_last_and_begin_anew_once_it_has_lasted():
    said: list[str] = []
    backoff = Backoff(max_pause_s=supervisor.MAX_PAUSE_S)
    pauses_s = [supervisor.pause_s(backoff, 1.0, said.append, lambda: 0.999) for _ in range(14)]
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[0] < 0.2, "the first loss costs no time besides the start"
    assert pauses_s[-1] == pytest.approx(supervisor.MAX_PAUSE_S, rel=0.01)
    assert supervisor.pause_s(backoff, FORGIVEN_S, said.append, lambda: 0.999) == pauses_s[0]
    assert "the 14. time in a row" in said[13]
    assert "in a row" not in said[14]


def test_a_start_that_fails_after_a_loss_is_repeated_and_before_it_is_not(supervised, tmp_path: Path):
    lives = tmp_path / "lives"
    rest = textwrap.dedent(f"""
        lives = open({str(lives)!r}, "a+"); lives.write("x"); lives.flush(); lives.seek(0)
        sys.exit({{1: {EXIT_LOST}, 2: {EXIT_FAILED}, 3: {EXIT_FAILED}}}.get(len(lives.read()), 2))
    """)
    assert supervised(rest).process.wait(LIMIT_S) == 2, "the caller's mistake is no loss"
    assert lives.read_text() == "xxxx"
    one = supervised(f"sys.exit({EXIT_FAILED})")
    assert one.process.wait(LIMIT_S) == EXIT_FAILED


def test_a_killed_command_is_started_again_without_what_it_had_started(supervised):
    one = supervised(WAIT)
    pid = int(one.wait_for("began").split()[2])
    one.wait_for("started")
    one.remember()
    os.kill(pid, signal.SIGKILL)
    one.wait_for("the cluster was lost")
    one.assert_nothing_is_left_of_the_life()
    one.wait_for("started")


def test_a_command_that_ends_by_itself_is_not_started_again(supervised):
    one = supervised("sys.exit(2)")
    one.wait_for("started")
    assert one.process.wait(LIMIT_S) == 2


def test_a_killed_life_starter_costs_no_life_and_starts_again_with_the_next(supervised):
    one = supervised(OBEY)
    one.wait_for("ready")
    starter, reaper = psutil.Process(one.process.pid).children()
    end = os.pidfd_open(starter.pid)
    starter.kill()
    assert select.select([end], [], [], LIMIT_S)[0]
    os.close(end)
    assert reaper.is_running()
    one.remember()
    reaper.kill()
    one.wait_for("the cluster was lost")
    one.wait_for("ready")
    one.process.terminate()
    assert one.process.wait(LIMIT_S) == 7
    one.assert_nothing_is_left()


def test_a_life_starter_that_cannot_import_is_a_failed_start(tmp_path: Path):
    starter = [sys.executable, "-m", "holdfast.cluster.serve.life_starter", "no_such_module"]
    assert supervisor.supervise(starter, "settings", 1.0, print) == EXIT_FAILED
