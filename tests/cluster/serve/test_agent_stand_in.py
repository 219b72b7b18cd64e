"""A stand-in for an agent of a raylet writes the agent's ports, heeds no signal, and ends with the process above it."""

import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from holdfast.cluster.serve import agent_stand_in

LIMIT_S = 60
NODE = "f00d"


def above(folder: Path) -> subprocess.Popen[bytes]:
    """A process that starts a stand-in, as a raylet does, and does not wait for it."""
    command = [sys.executable, "-I", "-S", agent_stand_in.__file__, "one_port,other_port", "agent.py", "--head"]
    command += [f"--session-dir={folder}", f"--node-id={NODE}"]
    program = f"import subprocess, time\nsubprocess.Popen({command!r})\ntime.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", program])


def child_once_written(raylet: subprocess.Popen[bytes], folder: Path) -> psutil.Process:
    limit_s = time.monotonic() + LIMIT_S
    while not (folder / f"other_port_{NODE}").exists():
        assert time.monotonic() < limit_s
        assert raylet.poll() is None
        select.select([], [], [], 0.01)
    (child,) = psutil.Process(raylet.pid).children()
    return child


def test_it_says_that_nothing_is_served(tmp_path: Path):
    agent_stand_in.write_ports(["one_port", "other_port"], str(tmp_path), NODE)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        f"one_port_{NODE}": "-1",
        f"other_port_{NODE}": "-1",
    }


def test_it_heeds_no_signal_and_ends_with_the_process_above(tmp_path: Path):
    raylet = above(tmp_path)
    try:
        stand_in = child_once_written(raylet, tmp_path)
        status = Path(f"/proc/{stand_in.pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            assert ignored >> (number - 1) & 1, number
    finally:
        raylet.kill()
        raylet.wait()
    psutil.wait_procs([stand_in], LIMIT_S)
    assert not stand_in.is_running()


def test_it_loads_nothing_but_the_standard_library(tmp_path: Path):
    """Each cluster keeps two of them."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import agent_stand_in; print(len(sys.modules))"
    folder = str(Path(agent_stand_in.__file__).parent)
    said = subprocess.run([sys.executable, "-I", "-S", "-c", code, folder], capture_output=True, text=True, check=True)
    assert int(said.stdout) < 80
