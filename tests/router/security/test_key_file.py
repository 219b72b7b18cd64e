"""The key file while it is written, revoked, lost and restored: the keys are those of its bytes, a look later."""

import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.router.security.api_keys import LOOK_EVERY_S, KeyFile, KeyRing, write_keys
from tests.router.security.test_gate import key_of

OLD, NEW, NONE = KeyRing([key_of("old")]), KeyRing([key_of("new")]), KeyRing([])
"""Of the same length are the first two."""

RINGS = {"old": OLD, "new": NEW, "none": NONE}
SAME_TIME_NS = 1_700_000_000_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def in_place(path: Path, ring: KeyRing) -> None:
    path.write_text(ring.written())


def in_one_piece(path: Path, ring: KeyRing) -> None:
    write_keys(path, ring)


def with_the_same_date(path: Path, ring: KeyRing) -> None:
    """As a backup is restored, or as a write within the same tick of the file system's clock."""
    path.write_text(ring.written())
    os.utime(path, ns=(SAME_TIME_NS, SAME_TIME_NS))


def by_a_link(path: Path, ring: KeyRing) -> None:
    """As Kubernetes exchanges a secret: the name is a link to another folder."""
    target = path.with_name(f"{path.name}.{len(list(path.parent.iterdir()))}")
    with_the_same_date(target, ring)
    link = path.with_suffix(".link")
    link.symlink_to(target)
    link.replace(path)


def removed_before(path: Path, ring: KeyRing) -> None:
    path.unlink()
    path.write_text(ring.written())


WAYS = (in_place, in_one_piece, with_the_same_date, by_a_link, removed_before)


@pytest.mark.in_turn
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", list(itertools.product(RINGS, repeat=3)), ids="-".join)
def test_the_keys_are_those_that_were_written_last(tmp_path: Path, way: Callable, order: tuple[str, ...]):
    """Whatever was looked at in between."""
    for seen in itertools.product((False, True), repeat=len(order)):
        path, clock = tmp_path / f"keys-{seen}", Clock()
        with_the_same_date(path, OLD)
        keys = KeyFile(path, clock)
        for name, is_seen in zip(order, seen, strict=True):
            way(path, RINGS[name])
            if is_seen:
                clock.now += LOOK_EVERY_S
                assert [key.name for key in keys.ring().keys] == [key.name for key in RINGS[name].keys]
        clock.now += LOOK_EVERY_S
        assert [key.name for key in keys.ring().keys] == [key.name for key in RINGS[order[-1]].keys]


def test_a_write_that_is_looked_at_after_each_byte_takes_no_key_away_before_its_end(tmp_path: Path, caplog):
    path, clock = tmp_path / "keys", Clock()
    in_place(path, OLD)
    keys = KeyFile(path, clock)
    content = KeyRing([key_of("old"), key_of("more")]).written()
    with path.open("w") as file:
        for byte in content:
            clock.now += LOOK_EVERY_S
            assert "old" in [key.name for key in keys.ring().keys]
            file.write(byte)
            file.flush()
    clock.now += LOOK_EVERY_S
    assert [key.name for key in keys.ring().keys] == ["old", "more"]
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1, "one complaint, however often it was looked at"


def test_what_cannot_be_read_for_a_while_is_read_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """As a file whose owner is changed after it was put in place: neither its date nor its size say so."""
    path, clock = tmp_path / "keys", Clock()
    in_place(path, OLD)
    keys = KeyFile(path, clock)
    in_one_piece(path, NEW)
    read = Path.read_bytes

    def refuses(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuses)
    for _ in range(3):
        clock.now += LOOK_EVERY_S
        assert [key.name for key in keys.ring().keys] == ["old"]
    monkeypatch.setattr(Path, "read_bytes", read)
    clock.now += LOOK_EVERY_S
    assert [key.name for key in keys.ring().keys] == ["new"]
    assert caplog.text.count("stay as they were") == 1


def test_it_is_looked_at_once_in_a_while(tmp_path: Path):
    path, clock = tmp_path / "keys", Clock()
    in_place(path, OLD)
    keys = KeyFile(path, clock)
    in_place(path, NEW)
    clock.now += LOOK_EVERY_S - 0.001
    assert [key.name for key in keys.ring().keys] == ["old"]
    clock.now += 0.001
    assert [key.name for key in keys.ring().keys] == ["new"]
