"""A process is told from all others, also from a later one of the same number."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from holdfast.worker.replica.processes import ProcessId


def test_the_text_of_an_id_leads_back_to_it():
    mine = ProcessId.of(os.getpid())
    assert ProcessId.parse(str(mine)) == mine


def test_a_name_that_looks_like_more_fields_does_not_matter():
    mine, name = ProcessId.of(os.getpid()), Path("/proc/self/comm")
    before = name.read_text()
    name.write_text(") 3 (")
    try:
        assert ProcessId.of(os.getpid()) == mine
    finally:
        name.write_text(before)


def test_it_ends_the_process_that_was_meant_and_no_other():
    with subprocess.Popen(["sleep", "1000"]) as process:
        meant = ProcessId.of(process.pid)
        with pytest.raises(ProcessLookupError):
            meant._replace(start_ticks=meant.start_ticks - 1).kill()
        assert process.poll() is None
        meant.kill()
        assert process.wait() == -signal.SIGKILL
    for look in (meant.kill, meant.open, lambda: ProcessId.of(meant.pid)):
        with pytest.raises(ProcessLookupError):
            look()
