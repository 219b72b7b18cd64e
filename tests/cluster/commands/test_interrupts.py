"""Ctrl-C in each phase of a start of `holdfast serve`: one line at most, no traceback, exit code 130."""

import os
import signal
import subprocess
import sys

import pytest

PROBE = """
import importlib.abc, os, signal, sys

phase = sys.argv[1]

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == phase:
            exec("os.kill(os.getpid(), signal.SIGINT)")  # as in one of the texts that dataclasses run

def start_nothing(event, details):
    if event == "subprocess.Popen":
        if phase != event:
            os._exit(99)
        os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.addaudithook(start_nothing)
sys.argv[1:] = ["serve", "--port", "0", "--http-port", "0"]
from holdfast.cluster.commands.entry import main
main()
"""
"""Interrupts itself where a module is looked for, or where its first process starts. No other process is started."""

PHASES = {
    "the command line is imported": "holdfast.cluster.commands.cli",
    "its library is imported": "cyclopts",
    "the command is imported": "holdfast.cluster.commands.serve",
    "the settings are imported": "pydantic",
    "the machine is looked at": "holdfast.cluster.config.machine",
    "the supervisor is imported": "holdfast.cluster.serve.supervisor",
    "the first process starts": "subprocess.Popen",
}


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_while_serve_starts_ends_with_a_line_and_130(phase, tmp_path):
    (tmp_path / "interrupted.py").write_text(PROBE)
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    command = [sys.executable, "-m", "interrupted", PHASES[phase]]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
    assert done.stderr in ("holdfast: interrupted\n", "")


def test_an_interrupt_that_was_ignored_stays_so_while_imports_run():
    """As below `nohup`, or for a job in a shell's background."""
    program = "import atexit, signal, sys; sys.argv[1:] = ['--version']; "
    program += "atexit.register(lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)); "
    program += "from holdfast.cluster.commands.entry import main; main()"
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert done.stdout.splitlines()[-1] == "True", done.stderr
