"""Blocks are handed out once, counted, and come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.block_allocator import BlockAllocator


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
    lost._free.pop()
    with pytest.raises(AssertionError, match="block 0 has 0 owners and is not in the free list"):
        lost.check_integrity()
    doubled._free.append(3)
    with pytest.raises(AssertionError, match="twice"):
        doubled.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 5)), max_size=60))
def test_any_order_of_calls_keeps_every_block_either_free_or_owned(calls):
    allocator = BlockAllocator(12, 4)
    held: list[list[int]] = []
    for call, number in calls:
        if call == "allocate" and number <= allocator.num_free:
            held.append(allocator.allocate(number))
        elif call == "share" and held:
            allocator.share(held[number % len(held)])
            held.append(list(held[number % len(held)]))
        elif call == "free" and held:
            allocator.free(held.pop(number % len(held)))
        allocator.check_integrity()
        owned = [block_id for block_ids in held for block_id in block_ids]
        assert [allocator.ref_count(block_id) for block_id in range(12)] == [owned.count(i) for i in range(12)]
    for block_ids in held:
        allocator.free(block_ids)
    assert allocator.num_free == 12
