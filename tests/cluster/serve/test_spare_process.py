"""The spare process: what it loads and when, and that only one is asked for. That Ray uses it, a benchmark shows."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from holdfast.cluster.serve import spare_process


def loaded(monkeypatch: pytest.MonkeyPatch, *, is_used: bool) -> list[str]:
    """What a worker process loads that has been idle for a while, or has become an actor's."""
    found: list[str] = []
    worker = SimpleNamespace(actor_id=SimpleNamespace(is_nil=lambda: not is_used))
    monkeypatch.setattr("ray._private.worker.global_worker", worker)
    monkeypatch.setattr(spare_process.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(spare_process.importlib, "import_module", found.append)
    spare_process._load_if_idle()
    return found


def test_an_idle_process_loads_what_a_replica_needs(monkeypatch):
    assert loaded(monkeypatch, is_used=False) == list(spare_process.LIBRARIES)


def test_a_process_that_is_used_is_left_alone(monkeypatch):
    assert loaded(monkeypatch, is_used=True) == []


def test_one_is_asked_for_where_there_is_none(monkeypatch, tmp_path):
    asked: list[int] = []
    monkeypatch.setitem(sys.modules, spare_process.PRELOADED, SimpleNamespace())
    monkeypatch.setattr(spare_process, "num_idle", lambda pid: len(asked))
    monkeypatch.setattr(spare_process, "_prestart", lambda: asked.append(1))
    spare_process.keep_one(tmp_path)
    spare_process.keep_one(tmp_path)
    assert asked == [1]


def test_none_is_asked_for_where_processes_would_not_load_anything(monkeypatch, tmp_path):
    monkeypatch.setattr(spare_process, "_prestart", lambda: pytest.fail("asked"))
    spare_process.keep_one(tmp_path)


def test_idle_processes_are_known_by_their_titles():
    """A child of a shell whose title is Ray's for idle ones, and one whose title is not."""
    script = "exec -a ray::IDLE sleep 60 & exec -a ray::Other sleep 60 & echo ready; wait"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        try:
            until = 1000
            while spare_process.num_idle(shell.pid) != 1 and until:
                until -= 1
            assert spare_process.num_idle(shell.pid) == 1
        finally:
            subprocess.run(["pkill", "-P", str(shell.pid)], check=False)
