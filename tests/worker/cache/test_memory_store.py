"""Block store in the host's memory: what is found of what was put, its bound, kept blocks, digests and news."""

import random

import pytest

from holdfast.worker.cache.memory_store import MemoryStore
from holdfast.worker.cache.sealing import DIGEST_BYTES
from tests.worker.cache.stores import Clock, found, name_of, put

SIZE = 1000
RECORD = SIZE + DIGEST_BYTES


def store_of(num_blocks: int = 10, share: float = 0.5, clock: Clock | None = None) -> MemoryStore:
    return MemoryStore(num_blocks * RECORD, clock=clock or Clock(), kept_share=share)


def names_of(numbers) -> list[bytes]:
    return [name_of(number) for number in numbers]


def test_what_was_put_is_found_once_and_nothing_else():
    store = store_of()
    assert (put(store, range(4), SIZE), put(store, range(2, 6), SIZE)) == (4, 2)
    assert found(store, range(10), SIZE) == set(range(6))
    assert (store.num_blocks, store.num_bytes) == (6, 6 * RECORD)
    assert store.news() == (names_of(range(6)), [])
    assert store.news() == ([], [])


def test_the_least_recently_used_give_way_within_the_bound():
    store = store_of()
    put(store, range(10), SIZE)
    store.news()
    found(store, (0, 1), SIZE)
    put(store, range(10, 14), SIZE)
    assert store.num_bytes == 10 * RECORD
    assert store.news() == (names_of(range(10, 14)), names_of(range(2, 6)))
    assert found(store, range(14), SIZE) == {0, 1, *range(6, 14)}


def test_a_block_beyond_the_bound_is_an_error_and_changes_nothing():
    store = store_of(2)
    put(store, range(2), SIZE)
    with pytest.raises(OSError, match="do not fit"):
        put(store, [5], 3 * SIZE)
    assert found(store, range(6), SIZE) == {0, 1}


def test_kept_blocks_go_last_until_their_time_is_up_and_within_their_tenants_share():
    clock = Clock()
    store = store_of(clock=clock)
    store.keep(names_of(range(3)), "gold", 300)
    store.keep(names_of((3, 4)), "gold", 100)
    store.keep(names_of((5, 6)), "gold", 300)  # beyond five blocks: the oldest give way
    put(store, range(7), SIZE)
    put(store, range(100, 120), SIZE)
    assert found(store, range(7), SIZE) == {0, 3, 4, 5, 6}
    clock.now += 101
    put(store, range(200, 220), SIZE)
    assert found(store, range(7), SIZE) == {0, 5, 6}
    store.keep(names_of([0]), "gold", 0)
    put(store, range(300, 320), SIZE)
    assert found(store, range(7), SIZE) == {5, 6}
    store.keep([], "free", 0)
    store.keep(names_of([5]), "free", 0)
    put(store, range(400, 420), SIZE)
    assert found(store, range(7), SIZE) == {5, 6}
    store.keep([], "gold", 0)
    put(store, range(500, 520), SIZE)
    assert found(store, range(7), SIZE) == set()


def test_where_all_is_kept_the_least_recently_used_go():
    store = store_of(share=1.0)
    store.keep(names_of(range(20)), "gold", 300)
    put(store, range(20), SIZE)
    assert found(store, range(20), SIZE) == set(range(10, 20))


def test_a_damaged_block_and_one_under_another_name_are_dropped_and_counted(caplog):
    store = store_of()
    put(store, range(3), SIZE)
    store._records[name_of(0)][17] ^= 1
    store._records[name_of(1)] = store._records[name_of(2)]
    store.news()
    assert found(store, range(3), SIZE) == {2}
    assert (store.num_failures, store.num_bytes, store.news()) == (2, RECORD, ([], names_of((0, 1))))
    assert "wrong digest" in caplog.text


def test_at_random_it_is_a_dictionary_within_a_bound():
    rng, store, there = random.Random(34), store_of(), set()
    for _ in range(300):
        numbers = rng.sample(range(40), rng.randrange(1, 6))
        if rng.random() < 0.5:
            put(store, numbers, SIZE)
        else:
            assert found(store, numbers, SIZE) <= there
        came, gone = store.news()
        there = (there | {number for number in range(40) if name_of(number) in came}) - {
            number for number in range(40) if name_of(number) in gone
        }
        assert found(store, range(40), SIZE) == there
        assert store.num_bytes == len(there) * RECORD <= 10 * RECORD


def test_planted_a_digest_that_is_not_checked_lets_another_block_pass(monkeypatch):
    store = store_of()
    monkeypatch.setattr(store.sealer, "unseal", lambda name, record: record[:-DIGEST_BYTES])
    put(store, range(2), SIZE)
    store._records[name_of(0)] = store._records[name_of(1)]
    with pytest.raises(AssertionError, match="not what was put"):
        found(store, range(2), SIZE)
