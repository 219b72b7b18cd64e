"""A guardian ends a leader that hangs, and its ranks: those processes, for that reason, and nothing else."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from worker.lifeline import Lifeline
from worker.process_id import ProcessId

TIMEOUT_S = 30
LIMIT_S = 0.5
ROOT = Path(__file__).parents[2]
PR_SET_PTRACER, PTRACE_SEIZE, PTRACE_DETACH = 0x59616D61, 0x4206, 17

LEADER = """
import asyncio, ctypes, sys
from worker.lifeline import Lifeline
from worker.process_id import ProcessId

async def live():
    lifeline = Lifeline(float(sys.argv[1]), map(ProcessId.parse, sys.argv[2:]))
    beating = asyncio.create_task(lifeline.keep_beating())
    await asyncio.sleep(0)
    print(lifeline.guardian, flush=True)
    while order := await asyncio.to_thread(sys.stdin.readline):
        if order == "hold the interpreter\\n":
            ctypes.PyDLL(None).sleep(1000)
        if order == "hold the loop\\n":
            ctypes.CDLL(None).sleep(1000)
        if order == "cut\\n":
            lifeline.cut()
            print("cut", flush=True)

asyncio.run(live())
"""


class Leader:
    """A process with a guardian and a rank."""

    def __init__(self, rank: ProcessId, limit_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEADER, str(limit_s), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.guardian = psutil.Process(ProcessId.parse(self.process.stdout.readline().decode()).pid)

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
    until(lambda: has_ended(leader.guardian))


def test_a_leader_that_is_killed_leaves_neither_ranks_nor_its_guardian(lead, rank):
    leader = lead(limit_s=1000)
    leader.process.kill()
    assert rank.wait(TIMEOUT_S) == -signal.SIGKILL
    until(lambda: has_ended(leader.guardian))


def test_a_leader_that_ends_in_peace_takes_its_guardian_along_and_nothing_else(lead, rank):
    leader = lead()
    leader.order("cut")
    assert leader.process.stdout.readline() == b"cut\n"
    assert has_ended(leader.guardian)
    leader.process.stdin.close()
    assert leader.process.wait(TIMEOUT_S) == 0
    assert rank.poll() is None


def test_a_leader_that_beats_lives_though_its_guardian_was_held_up(lead, rank):
    """The guardian wakes to a leader that it has not heard of for three times its limit, and that is yet to beat."""
    leader = lead(limit_s=1.0)
    leader.guardian.suspend()
    leader.process.send_signal(signal.SIGSTOP)
    time.sleep(0.1)  # beats that were under way
    drained = leader.guardian
    drained.resume()
    time.sleep(0.15)  # it reads them
    drained.suspend()
    time.sleep(3.0)
    drained.resume()
    time.sleep(0.15)
    leader.process.send_signal(signal.SIGCONT)
    time.sleep(1.2)
    assert leader.process.poll() is None
    assert rank.poll() is None


def test_a_number_that_belongs_to_another_by_now_is_left_alone(lead, rank):
    pid, start_ticks = ProcessId.of(rank.pid)
    leader = lead(rank_id=ProcessId(pid, start_ticks - 1))
    leader.process.send_signal(signal.SIGSTOP)
    leader.process.wait(TIMEOUT_S)
    until(lambda: has_ended(leader.guardian))
    assert rank.poll() is None


def test_another_takes_the_place_of_a_guardian_that_was_killed(monkeypatch):
    monkeypatch.setattr("worker.lifeline.START_AGAIN_AFTER_S", 0.0)

    async def kill_it() -> None:
        lifeline = Lifeline(1000, [])
        beating = asyncio.create_task(lifeline.keep_beating())
        first = lifeline.guardian
        first.kill()
        async with asyncio.timeout(TIMEOUT_S):
            while (second := lifeline.guardian) == first:
                await asyncio.sleep(0.01)
        lifeline.cut()
        lifeline.cut()
        await beating
        with pytest.raises(ProcessLookupError):
            second.open()

    asyncio.run(kill_it())


def test_a_guardian_loads_nothing_but_the_standard_library(lead):
    maps = (Path("/proc") / str(lead().guardian.pid) / "maps").read_text()
    assert "site-packages" not in maps
