"""The block store: what was put is found whole or not at all, whatever happens to its processes and its disk."""

import multiprocessing
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from holdfast.worker.cache import block_index, block_store
from holdfast.worker.cache.sealing import KeySealer, sealer_of
from holdfast.worker.errors import ConfigurationError
from tests.worker.cache.stores import KEYS, MAX_BYTES, ROW, found, name_of, opened, put, row_of

FORKS = multiprocessing.get_context("forkserver")
"""Forks a process without threads: a child of one in which gRPC runs may abort before it does anything."""
FORKS.set_forkserver_preload([__name__])


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_what_was_put_is_there_for_all_processes_and_after_them(tmp_path, key):
    first, second = opened(tmp_path, key=key), opened(tmp_path, key=key)
    assert (put(first, range(5)), put(second, range(3, 8))) == (5, 3)
    assert found(first, range(9)) == found(second, range(9)) == set(range(8))
    came, gone = first.news()
    assert (sorted(came), gone) == (sorted(map(name_of, range(8))), [])
    assert first.news() == ([], [])
    first.close()
    assert found(opened(tmp_path, key=key), range(9)) == set(range(8))


def open_all(folders: list[Path], at_once: Barrier) -> None:
    for folder in folders:
        at_once.wait()
        block_index.open_index(folder).close()


def test_processes_open_a_new_store_at_once(tmp_path):
    folders = [tmp_path / str(number) for number in range(40)]
    for folder in folders:
        folder.mkdir()
    at_once = FORKS.Barrier(4, timeout=20)
    processes = [FORKS.Process(target=open_all, args=(folders, at_once)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(40)
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()  # those that wait for one that failed
    assert exit_codes == [0] * 4


def test_kinds_and_keys_are_apart(tmp_path):
    put(opened(tmp_path), range(3))
    put(opened(tmp_path, key=bytes(32)), range(3, 5))
    assert found(opened(tmp_path, kind=b"other"), range(5)) == set()
    assert found(opened(tmp_path, key=bytes(range(32))), range(5)) == set()
    assert found(opened(tmp_path), range(5)) == {0, 1, 2}
    assert found(opened(tmp_path, key=bytes(32)), range(5)) == {3, 4}


def test_encrypted_neither_rows_nor_names_are_on_the_disk(tmp_path):
    put(opened(tmp_path, key=bytes(32)), range(3))
    on_disk = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert row_of(0)[:64] not in on_disk
    assert name_of(0)[1:] not in on_disk
    plain = tmp_path / "plain"
    put(opened(plain), range(3))
    on_disk = b"".join(path.read_bytes() for path in plain.iterdir())
    assert row_of(0)[:64] in on_disk
    assert name_of(0)[1:] in on_disk


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_damaged_row_is_not_served_and_can_be_put_again(tmp_path, key):
    store = opened(tmp_path, key=key)
    put(store, range(10))
    (segment,) = tmp_path.glob("*.blocks")
    damaged = bytearray(segment.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    segment.write_bytes(damaged)
    missing = set(range(10)) - found(store, range(10))
    assert (len(missing), store.num_failures) == (1, 1)
    assert put(store, range(10)) == 1
    assert found(store, range(10)) == set(range(10))


def test_a_row_that_the_index_takes_for_another_is_not_served(tmp_path):
    """The digest is of the name as well."""
    store = opened(tmp_path)
    put(store, [1, 2])
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        index.execute("UPDATE blocks SET offset = (SELECT min(offset) FROM blocks)")
    assert found(store, [1, 2]) == {1}
    assert store.num_failures == 1


def test_a_segment_that_was_cut_off_loses_its_end_alone(tmp_path):
    """As after a crash of the host, which had not written it."""
    put(opened(tmp_path), range(20))
    (segment,) = tmp_path.glob("*.blocks")
    os.truncate(segment, segment.stat().st_size // 2)
    left = found(opened(tmp_path), range(20))
    assert left
    assert left == set(range(max(left) + 1))


def test_the_least_recently_used_segment_goes_first(tmp_path):
    size = 100_000
    store, other = opened(tmp_path), opened(tmp_path, kind=b"other")
    put(other, range(1000, 1030), size)
    for number in range(0, 400, 10):
        put(store, range(number, number + 10), size)
        assert found(store, [0], size) == {0}  # used ever again
        store.news()
        assert store.num_bytes <= MAX_BYTES
    left = found(store, range(400), size)
    assert 0 in left
    assert set(range(350, 400)) <= left
    assert not left & set(range(50, 200))
    assert found(other, range(1000, 1030), size) == set(), "the bound is for all kinds together"


def test_what_another_process_has_deleted_is_told_of(tmp_path):
    size = 100_000
    store, other = opened(tmp_path), opened(tmp_path)
    put(store, range(10), size)
    assert len(store.news()[0]) == 10
    for number in range(1000, 1200, 10):
        put(other, range(number, number + 10), size)
    came, gone = store.news()
    assert set(gone) >= {name_of(0)}
    assert not set(gone) & set(came)
    assert found(store, range(10), size) == set()
    assert put(store, range(10), size) == 10, "its own segment was deleted, and it begins another one"
    assert found(other, range(10), size) == set(range(10))


@pytest.mark.parametrize("what", ["index.sqlite", "segments"])
def test_a_store_that_is_lost_begins_anew(tmp_path, what):
    put(opened(tmp_path), range(5))
    for path in tmp_path.glob("index.sqlite*" if what == "index.sqlite" else "*.blocks"):
        path.write_bytes(b"no index, and no segment either" * 200)
    store = opened(tmp_path)
    assert found(store, range(5)) == set()
    put(store, range(5))
    assert found(store, range(5)) == set(range(5))


def test_an_index_that_breaks_while_it_is_open_is_made_anew(tmp_path):
    store = opened(tmp_path)
    put(store, range(5))
    store.news()
    opened(tmp_path).close()
    for path in tmp_path.glob("index.sqlite*"):
        path.write_bytes(b"no index any more" * 4000)
    for _ in range(3):
        try:
            put(store, range(5, 9))
        except OSError:
            continue
        break
    came, gone = store.news()
    assert set(gone) | set(map(name_of, range(5))) == set(map(name_of, range(5)))
    assert found(store, range(9)) >= set(range(5, 9)), came


SWEEP = [0, 1, *range(500, 60_000, 6_000), *range(60_000, 500_000, 40_000)]
"""The largest that a file may be: a write that would go beyond is cut off there, and fails."""


def put_below(folder: Path, limit: int, on_write: Callable[[], None]) -> None:
    """Puts rows in this process, whose files may not grow beyond a limit."""
    try:
        on_write()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        store = opened(folder)
        for number in range(100, 120, 2):
            put(store, (number, number + 1))
            store.news()
    except (OSError, ConfigurationError):
        os._exit(1)
    except BaseException:
        os._exit(2)
    os._exit(0)


def in_child(folder: Path, limit: int, on_write: Callable[[], None]) -> int:
    """How a process that put rows ended: its exit status, or the signal that ended it, negative."""
    child = FORKS.Process(target=put_below, args=(folder, limit, on_write))
    child.start()
    child.join()
    return child.exitcode


def _be_killed() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _be_refused() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


@pytest.mark.parametrize("on_write", [_be_killed, _be_refused], ids=["killed", "refused"])
def test_a_process_may_end_or_fail_at_any_write(tmp_path, on_write):
    """Of a segment, of the index, or of its log."""
    ends = set()
    for limit in SWEEP:
        folder = tmp_path / str(limit)
        before = opened(folder)
        put(before, range(10))
        ends.add(in_child(folder, limit, on_write))
        with sqlite3.connect(folder / "index.sqlite") as index:
            assert index.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        for store in (before, opened(folder)):
            assert found(store, range(10)) == set(range(10)), "what was there stays"
            found(store, range(100, 120))
            assert store.num_failures == 0, "what the index has is whole"
        assert put(before, range(200, 205)) == 5
        before.close()
    assert ends >= ({-signal.SIGXFSZ, 0} if on_write is _be_killed else {1, 0})
    assert 2 not in ends


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    """Of each write in turn, the first of which is a part of the row alone."""
    store = opened(tmp_path)
    put(store, range(3))
    real, left = os.pwrite, 0

    def full(file: int, data: memoryview, offset: int) -> int:
        nonlocal left
        if left == 0:
            raise OSError(28, "No space left on device")
        left -= 1
        return real(file, data[: 1 + len(data) // 2], offset)

    monkeypatch.setattr(block_store.os, "pwrite", full)
    for left_before in (*range(30), 100):
        left = left_before
        number = 10 + left_before
        if left_before < 100:
            with pytest.raises(OSError, match="No space left"):
                put(store, range(100 * number, 100 * number + 5))
        else:
            assert put(store, range(100 * number, 100 * number + 5)) == 5
    sizes = sorted(path.stat().st_size for path in tmp_path.glob("*.blocks"))
    assert sum(sizes) == 8 * (ROW + 16)
    assert found(store, range(3)) == {0, 1, 2}


def test_a_key_file_has_32_bytes(tmp_path):
    file = tmp_path / "key"
    file.write_text("00" * 32 + "\n")
    assert isinstance(sealer_of(str(file)), KeySealer)
    file.write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="must have 32 bytes, or 64 hexadecimal digits"):
        sealer_of(str(file))
    with pytest.raises(ConfigurationError, match="No such file"):
        sealer_of(str(tmp_path / "none"))


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigurationError, match="can be written to by other users"):
        opened(tmp_path)


# --- a file system that is full, for real ---


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 3 MB of memory, which only root can make."""
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        os.getuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)], check=False).returncode
    ):
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_file_system_that_is_full_at_any_write_costs_new_blocks_alone(small_disk):
    """Of a segment, of the index, or of its log: what was there stays, and is found beside the full disk."""
    before = opened(small_disk / "store")
    put(before, range(10))
    filler, failed = small_disk / "filler", 0
    for left in (0, 4096, 8192, *range(16_384, 131_072, 8_192)):
        filler.write_bytes(b"")
        free = shutil.disk_usage(small_disk).free
        filler.write_bytes(bytes(max(0, free - left)))
        for number in range(1000, 1040, 2):
            try:
                put(before, (number, number + 1))
                before.news()
            except OSError:
                failed += 1
                break
        assert found(before, range(10)) == set(range(10)), f"{left} bytes were left"
        found(before, range(1000, 1040))
        assert before.num_failures == 0, "what the index has is whole"
        for number in range(1000, 1040):
            with suppress(OSError):
                before.drop(name_of(number))
    assert failed >= 4
    filler.unlink()
    assert put(before, range(200, 205)) == 5
    before.close()
    assert found(opened(small_disk / "store"), range(10)) == set(range(10))
