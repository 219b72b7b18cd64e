"""A hang supervisor ends a leader that hangs, and its ranks: those processes, for that reason, and nothing else."""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from holdfast.worker.replica.hang_verdict import BUSY_SHARE, BUSY_TIMES, HangVerdict
from holdfast.worker.replica.processes import ProcessId

TIMEOUT_S = 30
LIMIT_S = 0.5
ROOT = Path(__file__).parents[3]
PTRACE_SEIZE = 0x4206

LEADER = """
import asyncio, ctypes, os, sys, time
from holdfast.worker.replica.heartbeat_pipe import HeartbeatPipe
from holdfast.worker.replica.processes import ProcessId

async def live():
    pipe = HeartbeatPipe(float(sys.argv[1]), map(ProcessId.parse, sys.argv[2:]))
    beating = asyncio.create_task(pipe.keep_beating())
    await asyncio.sleep(0)
    print(pipe.hang_supervisor, flush=True)
    while order := await asyncio.to_thread(sys.stdin.readline):
        if order == "hold the interpreter\\n":
            ctypes.PyDLL(None).sleep(1000)
        if order == "hold the loop\\n":
            ctypes.CDLL(None).sleep(1000)
        if order.startswith("work "):
            _, num_bytes, wait_s, seconds = order.split()
            if int(num_bytes) >= 0:
                pipe.note_input(int(num_bytes))
            until_s = time.monotonic() + float(seconds)
            while time.monotonic() < until_s:
                time.sleep(float(wait_s)) if float(wait_s) else sum(range(1000))
            print("done", flush=True)
        if order == "fork\\n" and os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(1000)
        if order == "cut\\n":
            pipe.cut()
            print("cut", flush=True)

asyncio.run(live())
"""


class Leader:
    """A process with a hang supervisor and a rank."""

    def __init__(self, rank: ProcessId, limit_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEADER, str(limit_s), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.hang_supervisor = psutil.Process(ProcessId.parse(self.process.stdout.readline().decode()).pid)

    def order(self, what: str) -> None:
        self.process.stdin.write(f"{what}\n".encode())
        self.process.stdin.flush()


@pytest.fixture
def rank() -> Iterator[subprocess.Popen]:
    """A process that does nothing for a long time."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
def lead(rank) -> Iterator[Callable[..., Leader]]:
    """Starts leaders of `rank`."""
    leaders = []

    def start(rank_id: ProcessId | None = None, limit_s: float = LIMIT_S) -> Leader:
        leaders.append(Leader(rank_id or ProcessId.of(rank.pid), limit_s))
        return leaders[-1]

    yield start
    for leader in leaders:
        with leader.process:
            leader.process.kill()


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["SIGSTOP", "hold the interpreter", "hold the loop"])
def test_a_leader_that_hangs_is_ended_with_its_ranks(lead, rank, how):
    leader = lead()
    rank.send_signal(signal.SIGSTOP)  # it could not end itself
    if how == "SIGSTOP":
        leader.process.send_signal(signal.SIGSTOP)
    else:
        leader.order(how)
    assert leader.process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert rank.wait(TIMEOUT_S) == -signal.SIGKILL
    until(lambda: has_ended(leader.hang_supervisor))


LARGE = 2**20


def test_a_loop_that_is_held_by_large_input_is_busy_and_not_ended(lead):
    """As 8 s of decoding where a loop may be silent for 5 s."""
    leader = lead()
    leader.order(f"work {LARGE} 0 {1.6 * 2 * LIMIT_S}")
    assert leader.process.stdout.readline() == b"done\n"
    assert leader.process.poll() is None
    assert not has_ended(leader.hang_supervisor)


@pytest.mark.parametrize(
    "work",
    ["work -1 0 1000", "work 10 0 1000", f"work {LARGE} 1000 1000"],
    ids=["spins without input", "spins on small input", "waits for something on large input"],
)
def test_a_loop_that_is_held_by_anything_else_hangs(lead, rank, work):
    leader = lead()
    asked_s = time.monotonic()
    leader.order(work)
    assert leader.process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert rank.wait(TIMEOUT_S) == -signal.SIGKILL
    assert time.monotonic() - asked_s > LIMIT_S / 2


def test_a_process_that_is_stopped_on_large_input_hangs(lead):
    leader = lead()
    leader.order(f"work {LARGE} 0 1000")
    leader.process.send_signal(signal.SIGSTOP)
    assert leader.process.wait(TIMEOUT_S) == -signal.SIGKILL


@pytest.mark.slow
def test_eight_seconds_of_decoding_are_no_hang_at_the_default_limit(lead):
    leader = lead(limit_s=5.0)
    leader.order(f"work {LARGE} 0 8")
    assert leader.process.stdout.readline() == b"done\n"
    assert leader.process.poll() is None


def test_a_leader_that_is_killed_leaves_neither_ranks_nor_its_hang_supervisor(lead, rank):
    leader = lead(limit_s=1000)
    leader.process.kill()
    assert rank.wait(TIMEOUT_S) == -signal.SIGKILL
    until(lambda: has_ended(leader.hang_supervisor))


def test_a_child_that_a_leader_forked_and_left_keeps_no_hang_supervisor_alive(lead, rank):
    """It holds the pipe open as well."""
    leader = lead(limit_s=1000)
    leader.order("fork")
    child = psutil.Process(int(leader.process.stdout.readline()))
    leader.process.kill()
    assert rank.wait(TIMEOUT_S) == -signal.SIGKILL
    until(lambda: has_ended(leader.hang_supervisor))
    child.kill()


def test_a_leader_that_ends_in_peace_takes_its_hang_supervisor_along_and_nothing_else(lead, rank):
    leader = lead()
    leader.order("cut")
    assert leader.process.stdout.readline() == b"cut\n"
    assert has_ended(leader.hang_supervisor)
    leader.process.stdin.close()
    assert leader.process.wait(TIMEOUT_S) == 0
    assert rank.poll() is None


class Watched:
    """A hang supervisor of a process that cannot beat: the test does."""

    def __init__(self, limit_s: float) -> None:
        self.leader = subprocess.Popen(["sleep", "1000"])
        program = "from holdfast.worker.replica.hang_supervisor import main; main()"
        command = [sys.executable, "-c", program, str(limit_s), str(ProcessId.of(self.leader.pid))]
        self.hang_supervisor = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, cwd=ROOT)

    def beat(self) -> None:
        """Returns when the hang supervisor has heard it."""
        self.hang_supervisor.stdin.write(b".")
        until(lambda: fcntl.ioctl(self.hang_supervisor.stdin, termios.FIONREAD, bytes(4)) == bytes(4))


@pytest.fixture
def watch() -> Iterator[Callable[[float], Watched]]:
    """Starts what it is asked for, and ends it."""
    started = []

    def start(limit_s: float) -> Watched:
        started.append(Watched(limit_s))
        return started[-1]

    yield start
    for watched in started:
        for process in (watched.hang_supervisor, watched.leader):
            with process:
                process.kill()


def test_time_that_the_hang_supervisor_was_held_up_does_not_count(watch):
    """It wakes to a leader that it has not heard of for longer than its limit, and waits on."""
    watched = watch(1.0)
    watched.beat()
    watched.hang_supervisor.send_signal(signal.SIGSTOP)
    time.sleep(1.2)
    watched.hang_supervisor.send_signal(signal.SIGCONT)
    resumed_s = time.monotonic()
    assert watched.leader.wait(TIMEOUT_S) == -signal.SIGKILL
    assert time.monotonic() - resumed_s > 0.4


def test_a_leader_need_not_beat_before_its_first_beat_or_in_the_hands_of_a_debugger(watch):
    watched = watch(0.3)
    time.sleep(0.8)
    assert watched.leader.poll() is None
    if ctypes.CDLL(None).ptrace(PTRACE_SEIZE, watched.leader.pid, None, None) != 0:
        pytest.skip("this machine allows no tracing")
    watched.beat()
    time.sleep(0.8)
    assert watched.leader.poll() is None


def test_a_number_that_belongs_to_another_by_now_is_left_alone(lead, rank):
    pid, start_ticks = ProcessId.of(rank.pid)
    leader = lead(rank_id=ProcessId(pid, start_ticks - 1))
    leader.process.send_signal(signal.SIGSTOP)
    leader.process.wait(TIMEOUT_S)
    until(lambda: has_ended(leader.hang_supervisor))
    assert rank.poll() is None


# --- the rule, with a clock of its own ---

LOOK_S = 0.25


def hangs_after_s(
    said: Mapping[float, bytes], *, share: float = 1.0, starved: float = 0.0, most_s: float = 100.0
) -> float | None:
    """When a process is taken to hang whose limit is 5 s, which says this at these times, computes for a share of the
    time and waits for a core for another; None: it is not.
    """
    verdict, now, left = HangVerdict(5.0), 0.0, dict(said)
    while now < most_s:
        news = b"".join(left.pop(when) for when in sorted(left) if when <= now)
        if verdict.look(news, share * now, is_traced=False, now=now, starved_s=starved * LOOK_S if now else 0.0):
            return now
        now += LOOK_S
    return None


def test_the_rule_without_input_is_that_of_beats_alone():
    assert hangs_after_s({}) is None, "it has not begun to beat"
    assert hangs_after_s({0.0: b"."}) == 5.0
    assert hangs_after_s({when / 2: b"." for when in range(200)}) is None
    assert hangs_after_s({0.0: b".I."}) == 5.0, "the loop has turned since"


def test_large_input_gives_time_to_a_process_that_computes_and_not_for_ever():
    assert hangs_after_s({0.0: b".I"}) == 5.0 * BUSY_TIMES
    assert hangs_after_s({0.0: b".I", 8.0: b"."}, most_s=12.0) is None
    assert hangs_after_s({0.0: b".I"}, share=0.0) == 5.0
    assert hangs_after_s({0.0: b"I.I"}, share=BUSY_SHARE / 2) == 5.0


def test_time_without_a_core_does_not_count_and_not_for_ever():
    assert hangs_after_s({0.0: b"."}, starved=0.5) == 10.0
    assert hangs_after_s({0.0: b"."}, starved=1.0) == 5.0 * BUSY_TIMES


def test_small_input_is_a_sign_of_life_and_not_for_ever():
    assert hangs_after_s({0.0: b".", 2.0: b"i"}) == 7.0
    assert hangs_after_s({0.0: b".", **{when / 2: b"i" for when in range(1, 200)}}) == 5.0 * BUSY_TIMES
