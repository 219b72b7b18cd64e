"""Sequences keep their order of service, and blocks change hands whole."""

from collections.abc import Iterable

import pytest

from holdfast.worker.block_hash import HashChain
from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.request import EngineRequest, Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.kept_prefixes import SharedPrefix
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence, SequenceStatus


def make_queues(*priorities: Priority) -> SequenceQueues:
    """Queues in which sequences 0, 1, ... wait, each with a prompt of 6 tokens in a cache of 4-token blocks."""
    queues = SequenceQueues(BlockAllocator(16, 4, prefix_caching=True))
    for sequence_id, priority in enumerate(priorities):
        request = EngineRequest(
            request_id=str(sequence_id),
            prompt_token_ids=(1, 2, 3, 4, 5, 6),
            sampling_params=SamplingParams(seed=1),
            priority=priority,
        )
        queues.add(Sequence(sequence_id, request, max_model_len=50, eos_token_ids=frozenset()))
    return queues


def admit_first(queues: SequenceQueues, num_blocks: int, cached: Iterable[int] = ()) -> Sequence:
    sequence = queues.waiting.first()
    block_ids = tuple(cached)
    queues.admit(sequence, num_blocks, SharedPrefix(block_ids, 4 * len(block_ids)))
    return sequence


def ids(sequences: Iterable[Sequence]) -> list[int]:
    return [sequence.sequence_id for sequence in sequences]


def test_both_queues_stand_by_priority_then_arrival():
    queues = make_queues(Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.NORMAL)
    assert ids(queues.waiting) == [2, 1, 3, 0]
    admit_first(queues, 2)
    admit_first(queues, 2)
    assert (ids(queues.running), ids(queues.waiting)) == ([2, 1], [3, 0])
    queues.check_integrity()


def test_a_preempted_sequence_stands_in_its_old_place_without_blocks():
    queues = make_queues(Priority.NORMAL, Priority.NORMAL, Priority.NORMAL)
    admit_first(queues, 2)
    sequence = admit_first(queues, 2)
    queues.preempt(sequence)
    assert (sequence.status, sequence.block_ids) == (SequenceStatus.WAITING, ())
    assert (ids(queues.running), ids(queues.waiting)) == ([0], [1, 2])
    assert (queues.allocator.num_used, queues.counts.num_preemptions) == (2, 1)
    queues.check_integrity()


def test_tokens_lost_twice_are_known_as_far_as_they_ever_went():
    queues = make_queues(Priority.NORMAL)
    for num_computed in (5, 2):
        sequence = admit_first(queues, 2)
        sequence.num_computed_tokens = num_computed
        queues.preempt(sequence)
    assert (sequence.num_discarded_tokens, sequence.num_computed_tokens) == (5, 0)


def test_growing_adds_a_block_at_the_end():
    queues = make_queues(Priority.NORMAL)
    sequence = admit_first(queues, 2)
    queues.grow(sequence)
    assert sequence.block_ids == (0, 1, 2)


@pytest.mark.parametrize("num_admitted", [0, 1])
def test_a_removed_sequence_is_gone_with_its_blocks(num_admitted):
    queues = make_queues(Priority.NORMAL, Priority.NORMAL)
    sequence = queues.waiting.first()
    for _ in range(num_admitted):
        admit_first(queues, 2)
    queues.remove(sequence)
    assert (ids([*queues.waiting, *queues.running]), sequence.status) == ([1], SequenceStatus.FINISHED)
    assert queues.allocator.num_used == 0


def test_a_finished_sequence_wastes_all_its_slots_until_it_is_released():
    queues = make_queues(Priority.NORMAL, Priority.NORMAL)
    finished, _ = admit_first(queues, 2), admit_first(queues, 2)
    assert queues.num_wasted_slots() == 2 + 2
    finished.status = SequenceStatus.FINISHED
    assert queues.num_wasted_slots() == 8 + 2
    queues.release_finished()
    assert (ids(queues.running), queues.allocator.num_used) == ([1], 2)


def test_a_preempted_sequence_may_stand_between_those_that_go_on():
    queues = make_queues(Priority.NORMAL, Priority.NORMAL, Priority.NORMAL)
    sequences = [admit_first(queues, 2) for _ in range(3)]
    queues.preempt(sequences[1])
    assert (ids(queues.running), ids(queues.waiting)) == ([0, 2], [1])
    queues.check_integrity()


def test_a_full_block_is_shared_once_it_is_stored():
    queues = make_queues(Priority.NORMAL, Priority.NORMAL)
    first = admit_first(queues, 2)
    assert queues.cached_prefix(queues.waiting.first()).block_ids == ()
    first.num_computed_tokens = 6
    queues.store_full_blocks(first, 0)
    second = admit_first(queues, 2, queues.cached_prefix(queues.waiting.first()).block_ids)
    assert (first.block_ids, second.block_ids) == ((0, 1), (0, 2))
    assert (second.num_computed_tokens, second.num_cached_tokens) == (4, 4)
    assert (queues.counts.num_prefix_query_tokens, queues.counts.num_prefix_hit_tokens) == (12, 4)
    queues.check_integrity()


def test_a_cached_prefix_is_not_evicted_for_the_rest_of_the_same_sequence():
    queues = make_queues(Priority.NORMAL, Priority.NORMAL)
    first = admit_first(queues, 2)
    first.num_computed_tokens = 6
    queues.store_full_blocks(first, 0)
    queues.remove(first)
    others = queues.allocator.allocate(14)
    second = admit_first(queues, 2, queues.cached_prefix(queues.waiting.first()).block_ids)
    assert sorted((*second.block_ids, *others)) == list(range(16))
    assert queues.allocator.prefix_cache.num_evictions == 0


def test_coming_back_from_a_preemption_counts_as_no_new_query():
    queues = make_queues(Priority.NORMAL)
    sequence = admit_first(queues, 2)
    sequence.num_computed_tokens = 5
    queues.store_full_blocks(sequence, 0)
    queues.preempt(sequence)
    admit_first(queues, 2, queues.cached_prefix(sequence).block_ids)
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (4, 0)
    assert (queues.counts.num_prefix_query_tokens, queues.counts.num_prefix_hit_tokens) == (6, 0)


def test_check_integrity_finds_a_block_that_is_shared_before_it_is_full():
    queues = make_queues(Priority.NORMAL)
    sequence = admit_first(queues, 2)
    sequence.num_computed_tokens = 4
    queues.store_full_blocks(sequence, 0)
    sequence.num_computed_tokens = 3
    with pytest.raises(AssertionError, match="block 0 is shared before sequence 0 has filled it"):
        queues.check_integrity()


def test_check_integrity_finds_a_block_of_other_tokens():
    queues = make_queues(Priority.NORMAL)
    sequence = admit_first(queues, 2)
    sequence.num_computed_tokens = 4
    queues.allocator.prefix_cache.store(0, HashChain(""), [1, 2, 3, 5], 0)
    with pytest.raises(AssertionError, match="block 0 is not found by the tokens of sequence 0"):
        queues.check_integrity()


def test_check_integrity_finds_a_block_with_two_owners():
    queues = make_queues(Priority.NORMAL, Priority.NORMAL)
    first, second = admit_first(queues, 2), admit_first(queues, 2)
    second.block_ids = first.block_ids
    with pytest.raises(AssertionError, match="block 0 has 2 owners and a reference count of 1"):
        queues.check_integrity()


def test_check_integrity_finds_a_block_without_its_owner():
    queues = make_queues(Priority.NORMAL)
    admit_first(queues, 2).block_ids = (0,)
    with pytest.raises(AssertionError, match="block 1 has 0 owners and a reference count of 1"):
        queues.check_integrity()


def test_check_integrity_finds_one_who_jumped_the_line():
    queues = make_queues(Priority.NORMAL, Priority.NORMAL)
    admit_first(queues, 2), admit_first(queues, 2)
    queues.running.reverse()
    with pytest.raises(AssertionError, match="0 stands behind its turn"):
        queues.check_integrity()
