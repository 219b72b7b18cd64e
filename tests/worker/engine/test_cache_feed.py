"""Output queue: the changes of the prefix cache that a listener has not been sent are merged, complete, in pieces."""

from holdfast.worker.block_hash import short_adapter, short_hash
from holdfast.worker.cache.prefix_cache import BlockEvicted, BlockStored, CacheFeed
from holdfast.worker.step_update import CacheChanges


def block(number: int) -> bytes:
    return number.to_bytes(16, "little")


def stored(number: int) -> BlockStored:
    return BlockStored(block_hash=block(number), parent_hash=block(0))


def evicted(number: int) -> BlockEvicted:
    return BlockEvicted(block_hash=block(number))


def test_it_starts_with_all_there_is_and_goes_on_with_changes():
    feed = CacheFeed([block(1), block(2)])
    assert feed.has_news
    assert feed.take() == CacheChanges(stored=[1, 2], evicted=[])
    assert not feed.has_news
    assert not feed.take()
    feed.note([evicted(1), stored(3)])
    assert feed.take() == CacheChanges(stored=[3], evicted=[1])


def test_the_latest_word_on_a_block_counts():
    feed = CacheFeed([block(1), block(2)])
    feed.note([evicted(1), stored(3)])
    feed.note([stored(1), evicted(3), evicted(2)])
    changes = feed.take()
    assert set(changes.stored) == {1}
    assert set(changes.evicted) == {2, 3}


def test_adapters_are_among_the_changes():
    feed = CacheFeed([block(1)], adapters=["a", "b"])
    assert feed.take() == CacheChanges(stored=[1, short_adapter("a"), short_adapter("b")], evicted=[])
    feed.note_adapters({"a": False, "c": True})
    assert feed.take() == CacheChanges(stored=[short_adapter("c")], evicted=[short_adapter("a")])


def test_pieces_hold_everything_once_and_none_is_too_large():
    for num_stored in range(7):
        for num_evicted in range(7):
            changes = CacheChanges(stored=range(num_stored), evicted=range(100, 100 + num_evicted))
            parts = list(changes.parts(3))
            assert len(parts) == max(1, -(-(num_stored + num_evicted) // 3))
            assert all(len(part.stored) + len(part.evicted) <= 3 for part in parts)
            assert [one for part in parts for one in part.stored] == list(changes.stored)
            assert [one for part in parts for one in part.evicted] == list(changes.evicted)


def test_a_short_hash_is_the_first_64_bits():
    assert short_hash(bytes(range(16))) == 0x0706050403020100
