"""A disk that fills up: what is said, and what is given up. Readings are injected; the file is a real one."""

from pathlib import Path

from holdfast.cluster.serve.node_watch import ENOUGH_BYTES, LOW_BYTES, DiskGuard

RESERVE = 2**20
PLENTY = 10 * ENOUGH_BYTES


class Disk:
    def __init__(self, free: int) -> None:
        self.free = free
        self.said: list[str] = []

    def guard(self, folder: Path, reserve_bytes: int = RESERVE) -> DiskGuard:
        return DiskGuard(folder, self.said.append, reserve_bytes=reserve_bytes, free=lambda _: self.free)


def reserve(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_reserve_is_given_up_once_when_the_disk_fills_and_made_anew_when_it_is_mended(tmp_path: Path):
    disk = Disk(PLENTY)
    guard = disk.guard(tmp_path)
    assert (guard.look(), reserve(tmp_path), disk.said) == (False, RESERVE, [])
    disk.free = LOW_BYTES - 1
    assert (guard.look(), reserve(tmp_path)) == (True, 0)
    assert "is nearly full: 128 MiB are free; 1 MiB of reserve are freed" in disk.said[0]
    disk.free += RESERVE  # by that alone it is not mended
    assert (guard.look(), reserve(tmp_path), len(disk.said)) == (True, 0, 1)
    disk.free = PLENTY
    assert (guard.look(), reserve(tmp_path), len(disk.said)) == (False, RESERVE, 2)
    guard.close()
    assert reserve(tmp_path) == 0


def test_a_disk_with_little_room_is_not_filled_by_the_reserve(tmp_path: Path):
    disk = Disk(ENOUGH_BYTES)
    assert not disk.guard(tmp_path).look()
    assert (reserve(tmp_path), disk.said) == (0, [])


def test_who_only_looks_keeps_no_file(tmp_path: Path):
    disk = Disk(PLENTY)
    guard = disk.guard(tmp_path, 0)
    guard.look()
    assert reserve(tmp_path) == 0
    disk.free = 0
    assert guard.look()
    assert "of reserve" not in disk.said[0]


def test_who_only_looks_leaves_the_file_of_another_alone(tmp_path: Path):
    """A router of the same node may look first: the file is for whoever says that it is given up."""
    disk = Disk(PLENTY)
    owner, other = disk.guard(tmp_path), disk.guard(tmp_path, 0)
    owner.look()
    disk.free = 0
    assert (other.look(), reserve(tmp_path)) == (True, RESERVE)
    assert "of reserve" not in disk.said[0]
    other.close()
    assert (owner.look(), reserve(tmp_path)) == (True, 0)
    assert "1 MiB of reserve are freed" in disk.said[1]


def test_a_folder_that_is_gone_is_told_and_ends_nothing(tmp_path: Path):
    said: list[str] = []
    assert not DiskGuard(tmp_path / "gone", said.append).look()
    assert "cannot be read" in said[0]
