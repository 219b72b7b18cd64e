"""The folder of a GCS's tables is for its user alone, is removed, and is no victim of others' processes."""

import os
import stat
from collections import namedtuple
from pathlib import Path

import pytest

from holdfast.cluster.serve import kept_process as gcs_tables
from holdfast.cluster.serve.kept_process import ROOM_BYTES, tables_folder
from holdfast.worker.replica.processes import ProcessId

Usage = namedtuple("Usage", "free")


@pytest.fixture
def bases(tmp_path: Path) -> tuple[Path, Path]:
    made = tmp_path / "memory", tmp_path / "disk"
    for base in made:
        base.mkdir()
    return made


@pytest.mark.parametrize(("free", "place"), [(ROOM_BYTES, "memory"), (ROOM_BYTES - 1, "disk")])
def test_it_is_in_memory_where_there_is_room(
    bases: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, free: int, place: str
):
    monkeypatch.setattr(gcs_tables.shutil, "disk_usage", lambda _path: Usage(free))
    with tables_folder(*bases) as folder:
        assert folder.parent.name == place
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "kv").mkdir()
    assert not folder.exists()


def test_a_machine_without_shared_memory_uses_its_disk(bases: tuple[Path, Path], tmp_path: Path):
    with tables_folder(tmp_path / "missing", bases[1]) as folder:
        assert folder.parent == bases[1]


def test_folders_of_processes_that_are_gone_are_removed_and_others_are_not(bases: tuple[Path, Path]):
    here = ProcessId.of(os.getpid())
    alive = bases[0] / f"holdfast-gcs-{here.pid}-{here.start_ticks}-abc"
    reused = bases[0] / f"holdfast-gcs-{here.pid}-{here.start_ticks - 1}-abc"
    odd = bases[0] / "holdfast-gcs-what-is-this"
    for folder in (alive, reused, odd):
        folder.mkdir()
    with tables_folder(*bases):
        assert alive.exists()
        assert odd.exists()
        assert not reused.exists()
