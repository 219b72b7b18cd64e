"""What a container leaves of the machine's memory, read from files as cgroup v1 and v2 lay them."""

from pathlib import Path

import pytest

from holdfast.worker.process_memory import available_memory, control_groups, oom_kills, total_memory

MB = 2**20


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def groups(mounted: Path, lines: str) -> list:
    own = mounted.parent / "own"
    own.write_text(lines)
    return list(control_groups(mounted, own))


def v2(folder: Path, limit: str, used_mb: int, cached_mb: int = 0, kills: int = 0) -> None:
    write(folder, memory__max=limit, memory__current=str(used_mb * MB), memory__events=f"low 0\noom_kill {kills}")
    write(folder, memory__stat=f"anon 5\ninactive_file {cached_mb * MB}", cgroup__controllers="memory")


def v1(folder: Path, limit: int, used_mb: int, cached_mb: int = 0, kills: int = 0) -> None:
    write(folder, memory__limit_in_bytes=str(limit), memory__usage_in_bytes=str(used_mb * MB))
    write(folder, memory__stat=f"inactive_file 1\ntotal_inactive_file {cached_mb * MB}")
    write(folder, memory__oom_control=f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}")


def test_each_group_around_a_process_is_found_from_its_own_outwards(mounted):
    v2(mounted / "a/b", "max", 10, kills=3)
    v2(mounted / "a", str(100 * MB), 40, cached_mb=15)
    write(mounted, cgroup__controllers="memory")  # the root of the machine has no figures
    inner, outer = groups(mounted, "0::/a/b\n")
    assert (inner.limit_bytes, inner.num_oom_kills) == (None, 3)
    assert (outer.limit_bytes, outer.used_bytes) == (100 * MB, 25 * MB)


def test_the_first_version_is_read_as_well(mounted):
    v1(mounted / "memory/pod", 200 * MB, 90, cached_mb=30, kills=2)
    v1(mounted / "memory", 9223372036854771712, 900)
    inner, outer = groups(mounted, "9:cpu:/pod\n4:memory:/pod\n0::/\n")
    assert (inner.limit_bytes, inner.used_bytes, inner.num_oom_kills) == (200 * MB, 60 * MB, 2)
    assert outer.limit_bytes is None


def test_a_container_that_sees_its_own_group_as_the_root(mounted):
    """The path is the host's, which is not there."""
    v2(mounted, str(50 * MB), 20)
    (only,) = groups(mounted, "0::/kubepods/pod7/abc\n")
    assert only.limit_bytes == 50 * MB


def test_no_group_is_no_limit(mounted):
    assert groups(mounted, "") == []


def test_the_machine_that_runs_this_has_memory():
    assert 0 < available_memory() <= total_memory()
    assert oom_kills() >= 0
