"""The notes by which a command finds the cluster that another process of the same user runs."""

import json
import os
import stat
from pathlib import Path

import pytest

from holdfast.cluster.serve.running import noted, running_cluster
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.replica.processes import ProcessId


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "holdfast"


def note_of(folder: Path, pid: int, namespace: str, process: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{pid}.json"
    path.write_text(json.dumps({"namespace": namespace, "process": process, "ray_address": "a:1", "token": "t"}))
    return path


def test_a_cluster_is_found_while_it_runs_and_only_its_owner_can_read_of_it(folder):
    with noted("ours", "127.0.0.1:6379", "secret"):
        running = running_cluster("ours")
        assert (running.ray_address, running.token, running.pid) == ("127.0.0.1:6379", "secret", os.getpid())
        (note,) = folder.iterdir()
        assert stat.S_IMODE(note.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []
    with pytest.raises(ConfigurationError, match=r"0 such clusters run here \(none\); .* say --address"):
        running_cluster("ours")


def test_the_note_of_a_process_that_was_killed_is_cleared_away(folder):
    gone = note_of(folder, 1, "ours", "1:0")  # there is a process 1, but it is another one
    with pytest.raises(ConfigurationError, match="0 such clusters"):
        running_cluster("ours")
    assert not gone.exists()


def test_of_several_clusters_one_is_chosen_by_its_process(folder):
    note_of(folder, os.getppid(), "ours", str(ProcessId.of(os.getppid())))
    with noted("ours", "127.0.0.1:6379", "secret"):
        with pytest.raises(ConfigurationError, match=r"2 such clusters run here .* choose one by --pid"):
            running_cluster("ours")
        assert running_cluster("ours", os.getpid()).token == "secret"


def test_a_folder_that_others_can_write_to_is_not_believed(folder):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="must belong to this user"):
        running_cluster("ours")


def test_the_process_that_a_user_has_started_is_as_good_a_name(folder):
    with noted("ours", "127.0.0.1:6379", "secret", [50051, 50052]):
        assert running_cluster("ours", os.getppid()).token == "secret"
        with pytest.raises(ConfigurationError, match=r"1?\(.*of process \d+, gRPC on port 50051 and 50052\)"):
            running_cluster("ours", 2**22)
