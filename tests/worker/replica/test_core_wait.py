"""How long the threads of a process had no core: by files as the kernel writes them, and by real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.worker.replica.processes import CoreWait, ProcessId

GROUP = [ProcessId(7, 0), ProcessId(8, 0)]
S = 10**9
BUSY = "while True: pass"
IDLE = "import time; time.sleep(600)"


def write(proc: Path, pid: int, tid: int, ran_s: float, waited_s: float, state: str = "S") -> None:
    task = proc / str(pid) / "task" / str(tid)
    task.mkdir(parents=True, exist_ok=True)
    (task / "schedstat").write_text(f"{round(ran_s * S)} {round(waited_s * S)} 5\n")
    (task / "stat").write_text(f"{tid} (a) name) {state} 1 2 3\n")


def test_the_thread_that_waited_the_longest_counts(tmp_path):
    wait = CoreWait(lambda: GROUP, tmp_path)
    write(tmp_path, 7, 70, ran_s=1, waited_s=5)
    write(tmp_path, 8, 80, ran_s=1, waited_s=9)
    assert wait.since_last(0.1) == 0, "the first look has nothing to compare with"
    write(tmp_path, 7, 70, ran_s=1, waited_s=5.02)
    write(tmp_path, 8, 80, ran_s=1, waited_s=9.07)
    assert wait.since_last(0.1) == pytest.approx(0.07)
    write(tmp_path, 8, 80, ran_s=1, waited_s=12)
    assert wait.since_last(0.1) == 0.1, "no more than the time that has passed"


def test_a_thread_that_is_ready_and_has_not_run_waits_still(tmp_path):
    wait = CoreWait(lambda: GROUP, tmp_path)
    write(tmp_path, 7, 70, ran_s=1, waited_s=5, state="R")
    wait.since_last(0.1)
    assert wait.since_last(0.1) == 0.1
    write(tmp_path, 7, 70, ran_s=1.1, waited_s=5, state="R")
    assert wait.since_last(0.1) == 0, "it has run all the time"
    write(tmp_path, 7, 70, ran_s=1.1, waited_s=5, state="T")
    assert wait.since_last(0.1) == 0, "it is stopped"


def test_what_was_forgotten_does_not_count(tmp_path):
    wait = CoreWait(lambda: GROUP, tmp_path)
    write(tmp_path, 7, 70, ran_s=1, waited_s=5)
    wait.since_last(0.1)
    wait.forget()
    write(tmp_path, 7, 70, ran_s=1, waited_s=6)
    assert wait.since_last(0.1) == 0


def test_a_process_that_has_ended_waits_for_nothing(tmp_path):
    assert CoreWait(lambda: GROUP, tmp_path).since_last(0.1) == 0


@contextmanager
def program(text: str, core: int) -> Iterator[ProcessId]:
    """On one core, which others may share."""
    text = f"import os; os.sched_setaffinity(0, {{{core}}})\n{text}"
    process = subprocess.Popen([sys.executable, "-c", text])
    try:
        yield ProcessId.of(process.pid)
    finally:
        process.kill()
        process.wait()


def shares(processes: Mapping[str, ProcessId], looks: int = 10, every_s: float = 0.1) -> dict[str, float]:
    """Of the time, for which each process had no core and wanted one."""
    waits = {name: CoreWait(lambda process=process: [process]) for name, process in processes.items()}
    waited_s = dict.fromkeys(waits, 0.0)
    for wait in waits.values():
        wait.since_last(every_s)
    began_s = last_s = time.monotonic()
    for _ in range(looks):
        time.sleep(every_s)
        now_s = time.monotonic()
        for name, wait in waits.items():
            waited_s[name] += wait.since_last(now_s - last_s)
        last_s = now_s
    return {name: seconds / (last_s - began_s) for name, seconds in waited_s.items()}


def test_the_kernels_own_figures_tell_starved_from_stopped_and_idle():
    core = min(os.sched_getaffinity(0))
    with (
        program(BUSY, core),
        program(BUSY, core) as starved,
        program(BUSY, core) as stopped,
        program(IDLE, core) as idle,
    ):
        time.sleep(0.5)  # so that all of them have begun
        os.kill(stopped.pid, signal.SIGSTOP)
        os.waitpid(stopped.pid, os.WUNTRACED)  # it is told of the signal once it has the core
        found = shares({"starved": starved, "stopped": stopped, "idle": idle})
    assert found["starved"] > 0.3
    assert max(found["stopped"], found["idle"]) < 0.1, found
