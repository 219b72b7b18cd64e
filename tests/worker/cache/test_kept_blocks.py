"""Blocks of a store that are kept for a time: they outlive others, within the share of their tenant."""

import sqlite3
from pathlib import Path

import pytest

from holdfast.worker.cache import block_index, block_store
from holdfast.worker.cache.block_store import BlockStore
from holdfast.worker.cache.sealing import KeySealer, Sealer
from tests.worker.cache.stores import KEYS, MAX_BYTES, Clock, found, name_of, put

SIZE = 100_000


def keeping(folder: Path, clock: Clock, share: float = 0.25, key: bytes | None = None) -> BlockStore:
    sealer = Sealer() if key is None else KeySealer(key)
    return BlockStore(folder, MAX_BYTES, b"kind", sealer, clock=clock, kept_share=share)


def names_of(numbers) -> list[bytes]:
    return [name_of(number) for number in numbers]


def flood(store: BlockStore, begin: int = 10_000) -> None:
    """Others, twice as many as there is room for."""
    for number in range(begin, begin + 320, 10):
        put(store, range(number, number + 10), SIZE)


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_kept_blocks_outlive_others_that_were_used_later_and_no_longer_than_was_asked(tmp_path, key):
    clock = Clock()
    store = keeping(tmp_path, clock, key=key)
    store.keep(names_of(range(0, 30, 3)), "gold", 300)  # scattered among others, and not stored yet
    put(store, range(30), SIZE)
    flood(store)
    assert found(store, range(30), SIZE) == set(range(0, 30, 3))
    store.close()
    again = keeping(tmp_path, clock, key=key)
    came, _ = again.news()
    assert set(names_of(range(0, 30, 3))) <= set(came)
    flood(again, 20_000)
    assert found(again, range(30), SIZE) == set(range(0, 30, 3)), "after a restart as well"
    assert again.num_bytes <= MAX_BYTES
    clock.now += 301
    flood(again, 30_000)
    assert found(again, range(30), SIZE) == set()


def test_another_process_finds_what_was_moved_and_is_not_told_that_it_went(tmp_path):
    clock = Clock()
    store, other = keeping(tmp_path, clock), keeping(tmp_path, clock)
    put(store, range(10), SIZE)
    store.keep(names_of(range(4)), "gold", 300)
    other.news()
    flood(store)
    came, gone = other.news()
    assert not set(names_of(range(4))) & {*came, *gone}
    assert set(names_of(range(4, 10))) <= set(gone)
    assert found(other, range(10), SIZE) == set(range(4))


def test_a_tenant_keeps_its_share_and_the_oldest_give_way(tmp_path):
    clock = Clock()
    store = keeping(tmp_path, clock, share=0.1)  # 16 blocks
    for number in (0, 100, 200):
        put(store, range(number, number + 8), SIZE)
        store.keep(names_of(range(number, number + 8)), "gold", 300)
    put(store, range(500, 504), SIZE)
    store.keep(names_of(range(500, 504)), "free", 300)
    store.keep(names_of(range(8)), "gold", 1)  # renewed, and not shortened
    clock.now += 2
    flood(store)
    assert found(store, range(8), SIZE) == set(range(8))
    assert found(store, range(100, 108), SIZE) == set()
    assert found(store, range(200, 208), SIZE) == set(range(200, 208))
    assert found(store, range(500, 504), SIZE) == set(range(500, 504))


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_names_are_kept_no_longer_on_order(tmp_path, key):
    store, gold, free = keeping(tmp_path, Clock(), key=key), [*range(0, 24, 3)], [*range(24, 36, 3)]  # among others
    store.keep(names_of(gold), "gold", 300)
    store.keep(names_of(free), "free", 300)
    put(store, range(36), SIZE)
    store.keep(names_of(gold), "free", 0)  # of another tenant
    store.keep(names_of(gold[:2]), "gold", 0)
    flood(store)
    assert found(store, range(36), SIZE) == {*gold[2:], *free}
    store.keep([], "gold", 0)
    flood(store, 20_000)
    assert found(store, range(36), SIZE) == set(free)


def test_where_nearly_all_is_kept_the_oldest_go_as_without(tmp_path):
    store = keeping(tmp_path, Clock(), share=1.0)
    for number in range(0, 400, 10):
        put(store, range(number, number + 10), SIZE)
        store.keep(names_of(range(number, number + 10)), "gold", 300)
    assert store.num_bytes <= MAX_BYTES
    assert set(range(390, 400)) <= found(store, range(400), SIZE)


def test_a_disk_that_fails_while_kept_blocks_are_moved_loses_them_alone(tmp_path, monkeypatch):
    store = keeping(tmp_path, Clock())
    put(store, range(10), SIZE)
    store.keep(names_of(range(4)), "gold", 300)
    monkeypatch.setattr(block_store.os, "pread", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    flood(store)
    monkeypatch.undo()
    assert found(store, range(10), SIZE) == set()
    assert set(range(10_310, 10_320)) <= found(store, range(10_310, 10_320), SIZE)


def test_planted_a_pin_that_leaks_keeps_its_blocks_for_ever(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(block_index.KeptNames, "end", lambda self: None)
    store = keeping(tmp_path, clock)
    put(store, range(4), SIZE)
    store.keep(names_of(range(4)), "gold", 300)
    clock.now += 301
    flood(store)
    assert found(store, range(4), SIZE) == set(range(4)), "what the first test would not let pass"


def listed(store: BlockStore) -> list[tuple[str, bytes, int, float]]:
    return sorted((one.tenant, one.last_hash, one.num_blocks, one.ttl_s) for one in store.kept_prefixes(b"k"))


def pin(tenant: str, number: int, num_blocks: int, ttl_s: float = 300.0) -> tuple[str, bytes, int, float]:
    return tenant, name_of(number)[1:], num_blocks, ttl_s


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_kept_prefixes_are_listed_as_far_as_they_are_stored_also_after_a_restart(tmp_path, key):
    clock = Clock()
    store = keeping(tmp_path, clock, key=key)
    put(store, range(40), SIZE)
    state = b"s" + name_of(3)[1:]
    store.put([(state, memoryview(b"state" * 100))])
    store.keep([*names_of(range(4)), state], "gold", 300)
    store.keep(names_of(range(10, 13)), "", 300)
    store.keep(names_of([20, 21, 900, 901]), "\udc80 odd", 300)  # the last two are not stored
    store.keep(names_of([950]), "free", 300)
    store.close()
    clock.now += 100
    again = keeping(tmp_path, clock, key=key)
    expected = [pin("gold", 3, 4, 200.0), pin("", 12, 3, 200.0), pin("\udc80 odd", 21, 2, 200.0)]
    assert listed(again) == sorted(expected)
    hidden = (tmp_path / "index.sqlite").read_bytes() + (tmp_path / "index.sqlite-wal").read_bytes()
    assert (b"gold" in hidden) == (key is None), "names of tenants are encrypted as well"
    other = BlockStore(tmp_path, MAX_BYTES, b"another kind", Sealer() if key is None else KeySealer(key), clock=clock)
    assert listed(other) == []
    other.close()
    clock.now += 201
    assert listed(again) == []
    again.close()


def test_a_prefix_of_a_longer_one_is_listed_if_it_is_kept_longer(tmp_path):
    store = keeping(tmp_path, Clock())
    put(store, range(10), SIZE)
    store.keep(names_of(range(4)), "gold", 500)
    store.keep(names_of(range(6)), "gold", 300)
    assert listed(store) == sorted([pin("gold", 5, 6), pin("gold", 3, 4, 500.0)])
    store.keep(names_of(range(6)), "gold", 500)
    assert listed(store) == [pin("gold", 5, 6, 500.0)]


def test_a_prefix_is_unpinned_by_its_last_name_and_its_beginning_stays_as_long_as_a_longer_one(tmp_path):
    store = keeping(tmp_path, Clock())
    state = b"s" + name_of(5)[1:]
    put(store, range(10), SIZE)
    store.keep(names_of(range(4)), "gold", 500)
    store.keep([*names_of(range(6)), state], "gold", 300)
    store.keep(names_of(range(7, 10)), "free", 300)
    store.keep(names_of([3, 5]), "free", -1)  # of another tenant
    store.keep(names_of([8]), "gold", -1)
    assert listed(store) == sorted([pin("gold", 5, 6), pin("gold", 3, 4, 500.0), pin("free", 9, 3)])
    store.keep(names_of([3]), "gold", -1)
    assert listed(store) == sorted([pin("gold", 5, 6), pin("free", 9, 3)])
    store.keep(names_of([5]), "gold", -1)
    assert listed(store) == [pin("free", 9, 3)]
    store.keep([name_of(9), b"s" + name_of(9)[1:]], "free", -1)
    assert listed(store) == []
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        left = [index.execute(f"SELECT count(*) FROM {table}").fetchone() for table in ("kept", "tenants")]
    assert left == [(0,), (0,)], "snapshots and names of tenants go with them"


def test_planted_a_list_that_forgets_tenants_apart(tmp_path, monkeypatch):
    """What the list would show if an unpinned prefix of one tenant ended another's."""
    monkeypatch.setattr(BlockStore, "_keep", lambda self, names, tenant, ttl_s: keep(self, names, "gold", ttl_s))
    store = keeping(tmp_path, Clock())
    put(store, range(4), SIZE)
    store.keep(names_of(range(4)), "gold", 300)
    store.keep(names_of([3]), "free", -1)
    assert listed(store) == [], "what the test above would not let pass"


keep = BlockStore._keep
