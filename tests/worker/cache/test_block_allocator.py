"""Blocks are handed out once, counted, and come back; those that hold a prefix are handed out again last."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.block_hash import HashChain
from holdfast.worker.cache.block_pool import BlockAllocator


def test_a_fresh_cache_hands_out_neighbours_in_order():
    allocator = BlockAllocator(8, 16)
    assert allocator.allocate(3) == [0, 1, 2]
    assert allocator.allocate(2) == [3, 4]
    assert (allocator.num_free, allocator.num_used) == (3, 5)


def test_blocks_freed_together_come_out_together_in_the_same_order():
    allocator = BlockAllocator(8, 16)
    first, _ = allocator.allocate(3), allocator.allocate(2)
    allocator.free(first)
    assert allocator.allocate(3) == first


def test_a_shared_block_is_free_only_after_its_last_owner_left():
    allocator = BlockAllocator(4, 16)
    block_ids = allocator.allocate(2)
    allocator.share(block_ids[:1])
    allocator.free(block_ids)
    assert (allocator.ref_count(0), allocator.ref_count(1), allocator.num_free) == (1, 0, 3)
    allocator.free(block_ids[:1])
    assert allocator.num_free == 4
    allocator.check_integrity()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_the_last_block_may_be_partly_filled(num_tokens, num_blocks):
    assert BlockAllocator(4, 16).num_blocks_for(num_tokens) == num_blocks


def test_more_blocks_than_are_free_is_our_mistake():
    allocator = BlockAllocator(2, 16)
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 are free"):
        allocator.allocate(3)
    assert allocator.num_free == 2


def test_a_double_free_is_found_at_once():
    allocator = BlockAllocator(4, 16)
    block_ids = allocator.allocate(1)
    allocator.free(block_ids)
    with pytest.raises(AssertionError, match="block 0 is freed but not allocated"):
        allocator.free(block_ids)


@pytest.mark.parametrize("block_id", [-1, 4])
def test_a_foreign_block_is_found_at_once(block_id):
    allocator = BlockAllocator(4, 16)
    allocator.allocate(4)
    with pytest.raises(AssertionError, match="is not one of the 4 blocks"):
        allocator.free([block_id])


def test_sharing_a_free_block_is_found_at_once():
    with pytest.raises(AssertionError, match="block 3 is shared but not allocated"):
        BlockAllocator(4, 16).share([3])


def test_check_integrity_finds_a_lost_block_and_one_that_is_free_twice():
    lost, doubled = BlockAllocator(4, 16), BlockAllocator(4, 16)
    lost._blank.pop()
    with pytest.raises(AssertionError, match="block 0 has 0 owners and is not cached, and is not blank"):
        lost.check_integrity()
    doubled._blank.append(3)
    with pytest.raises(AssertionError, match="twice"):
        doubled.check_integrity()


def with_stored(num_blocks: int, *num_stored: int) -> tuple[BlockAllocator, list[list[int]]]:
    """An allocator of one-token blocks and the blocks of some owners, so many each, stored under their own salts."""
    allocator = BlockAllocator(num_blocks, 1, prefix_caching=True)
    owners = [allocator.allocate(number) for number in num_stored]
    for salt, block_ids in enumerate(owners):
        chain = HashChain(str(salt))
        for index, block_id in enumerate(block_ids):
            allocator.prefix_cache.store(block_id, chain, range(len(block_ids)), index)
    return allocator, owners


def test_a_stored_block_without_an_owner_is_free_and_stays_cached():
    allocator, (first,) = with_stored(4, 2)
    allocator.free(first)
    assert (allocator.num_free, allocator.num_cached, allocator.num_used) == (4, 2, 0)
    allocator.share(first[:1])
    assert (allocator.num_free, allocator.num_cached, allocator.ref_count(0)) == (3, 1, 1)
    allocator.check_integrity()


def test_blank_blocks_go_before_cached_ones_and_those_in_order_of_release_the_last_of_an_owner_first():
    allocator, (first, second) = with_stored(6, 2, 3)
    allocator.free(second)
    allocator.free(first)
    assert [allocator.allocate(1) for _ in range(6)] == [[5], [4], [3], [2], [1], [0]]
    assert allocator.prefix_cache.num_evictions == 5
    allocator.check_integrity()


def test_a_block_that_was_shared_again_is_evicted_after_those_that_were_not():
    allocator, (first, second) = with_stored(4, 2, 2)
    allocator.free(first)
    allocator.free(second)
    allocator.share(first)
    allocator.free(first)
    assert allocator.allocate(2) == second
    assert all(block_id in allocator.prefix_cache.contents for block_id in first)


def test_evicted_blocks_come_out_together_in_their_order():
    allocator, (first,) = with_stored(4, 4)
    allocator.free(first)
    assert allocator.allocate(3) == [1, 2, 3]


def test_check_integrity_finds_an_owned_block_among_the_evictable_and_a_cached_one_among_the_blank():
    owned, blank = with_stored(2, 1)[0], with_stored(2, 1)[0]
    owned._evictable[0] = 0
    with pytest.raises(AssertionError, match="block 0 has 1 owners and is cached, and is not blank and evictable"):
        owned.check_integrity()
    blank.free([0])
    blank._blank.append(blank._evictable.popitem()[0])
    with pytest.raises(AssertionError, match="block 0 has 0 owners and is cached, and is blank and not evictable"):
        blank.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free", "store"]), st.integers(0, 5)), max_size=60))
def test_any_order_of_calls_keeps_every_block_either_free_or_owned(calls):
    allocator = BlockAllocator(12, 4, prefix_caching=True)
    held: list[list[int]] = []
    for call, number in calls:
        if call == "allocate" and number <= allocator.num_free:
            held.append(allocator.allocate(number))
        elif call == "share" and held:
            allocator.share(held[number % len(held)])
            held.append(list(held[number % len(held)]))
        elif call == "free" and held:
            allocator.free(held.pop(number % len(held)))
        elif call == "store" and held:
            chain, cache = HashChain(str(number)), allocator.prefix_cache
            for index, block_id in enumerate(held[number % len(held)]):
                if block_id not in cache.contents:
                    cache.store(block_id, chain, range(48), index)
        allocator.check_integrity()
        owned = [block_id for block_ids in held for block_id in block_ids]
        assert [allocator.ref_count(block_id) for block_id in range(12)] == [owned.count(i) for i in range(12)]
    for block_ids in held:
        allocator.free(block_ids)
    assert allocator.num_free == 12
