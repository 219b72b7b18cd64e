"""Who waits and who runs, in order of service, and the blocks they own.

The one place where a sequence changes its status and where blocks change hands; each method keeps `check_integrity`
true. What may not live here: deciding who is admitted or preempted, and when (`batching.py`).
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from worker.block_allocator import BlockAllocator
from worker.sequence import Sequence, SequenceStatus


class SequenceQueues:
    """`waiting` and `running` are sorted by `Sequence.service_order`; others read them and change them only from here.

    Sorted lists rather than heaps: their lengths are bounded by the settings, moving a thousand pointers costs less
    than a microsecond, and the first, the last and any aborted one are at hand.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """The cached blocks that a waiting sequence can begin with: whole blocks, and never all of its tokens, because
        it takes computing the last to draw the next."""
        max_num_blocks = (len(sequence.token_ids) - 1) // self.allocator.block_size
        return self.allocator.prefix_cache.find(sequence.hash_chain, sequence.token_ids, max_num_blocks)

    def admit_first(self, num_blocks: int, cached: Iterable[int] = ()) -> Sequence:
        """Move the first of the waiting to the running with so many blocks, the first of them its `cached_prefix`."""
        sequence = self.waiting.pop(0)
        prefix = tuple(cached)
        self.allocator.share(prefix)
        sequence.block_ids = (*prefix, *self.allocator.allocate(num_blocks - len(prefix)))
        sequence.num_computed_tokens = len(prefix) * self.allocator.block_size
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_order)
        self._count_prefix(sequence)
        return sequence

    def grow(self, sequence: Sequence, num_blocks: int = 1) -> None:
        """Give a running sequence more blocks."""
        sequence.block_ids += tuple(self.allocator.allocate(num_blocks))

    def shrink(self, sequence: Sequence, num_blocks: int) -> None:
        """Take the last blocks of a running sequence, in which nothing is computed that counts."""
        kept = len(sequence.block_ids) - num_blocks
        self.allocator.free(sequence.block_ids[kept:])
        sequence.block_ids = sequence.block_ids[:kept]

    def store_full_blocks(self, sequence: Sequence, first_position: int) -> None:
        """Let others find the blocks that a running sequence has filled, by computing from `first_position` on."""
        block_size = self.allocator.block_size
        for index in range(first_position // block_size, sequence.num_computed_tokens // block_size):
            block_id = sequence.block_ids[index]
            self.allocator.prefix_cache.store(block_id, sequence.hash_chain, sequence.token_ids, index)

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to wait. It keeps its outputs and loses all that was computed, but for what the
        prefix cache still has of it when it comes back.

        Its place in line is before everyone of its priority who came later, so in effect at their front.
        """
        self._take_out(self.running, sequence)
        sequence.num_discarded_tokens = max(sequence.num_discarded_tokens, sequence.num_computed_tokens)
        sequence.num_computed_tokens = 0
        self._free_blocks(sequence)
        sequence.status = SequenceStatus.WAITING
        self.add(sequence)
        self.num_preemptions += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting or running sequence out for good and free its blocks."""
        self._take_out(self.running if sequence.status is SequenceStatus.RUNNING else self.waiting, sequence)
        self._free_blocks(sequence)
        sequence.status = SequenceStatus.FINISHED

    def release_finished(self) -> None:
        """Free the blocks of those that finished since they were admitted, and drop them from `running`."""
        for sequence in self.running:
            if sequence.status is SequenceStatus.FINISHED:
                self._free_blocks(sequence)
        self.running = [sequence for sequence in self.running if sequence.status is SequenceStatus.RUNNING]

    def num_wasted_slots(self) -> int:
        """Slots that are allocated, but for no token that their sequence has so far; all slots of a finished one."""
        block_size = self.allocator.block_size
        wasted = 0  # shared blocks are full, so none is counted twice
        for sequence in self.running:
            num_tokens = len(sequence.token_ids) if sequence.status is SequenceStatus.RUNNING else 0
            wasted += max(0, len(sequence.block_ids) * block_size - num_tokens)
        return wasted

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, states and orders agree. O(blocks + sequences)."""
        self.allocator.check_integrity()
        owners = Counter(block_id for sequence in self.running for block_id in sequence.block_ids)
        for block_id in range(self.allocator.num_blocks):
            counted, found = self.allocator.ref_count(block_id), owners[block_id]
            assert counted == found, f"block {block_id} has {found} owners and a reference count of {counted}"
        for queue in (self.waiting, self.running):
            for before, after in pairwise(queue):
                assert before.service_order < after.service_order, f"{after.sequence_id} stands behind its turn"
        for sequence in self.waiting:
            assert sequence.status is SequenceStatus.WAITING, f"waiting {sequence.sequence_id} is {sequence.status}"
            assert not sequence.block_ids, f"waiting sequence {sequence.sequence_id} owns blocks"
            assert sequence.num_computed_tokens == 0, f"waiting sequence {sequence.sequence_id} has computed tokens"
        for sequence in self.running:
            assert sequence.status is not SequenceStatus.WAITING, f"running sequence {sequence.sequence_id} waits"
            self._check_blocks(sequence)

    def _check_blocks(self, sequence: Sequence) -> None:
        """What a running sequence may still write to is its own and not to be found; what is found holds its tokens."""
        block_size, cache = self.allocator.block_size, self.allocator.prefix_cache
        num_full = sequence.num_computed_tokens // block_size
        num_slots = len(sequence.block_ids) * block_size
        assert sequence.num_computed_tokens <= num_slots, f"sequence {sequence.sequence_id} has too few blocks"
        for index, block_id in enumerate(sequence.block_ids):
            if index >= num_full:
                is_own = self.allocator.ref_count(block_id) == 1 and block_id not in cache
                assert is_own, f"block {block_id} is shared before sequence {sequence.sequence_id} has filled it"
            elif (found := cache.hash_in(block_id)) is not None:
                is_right = found == sequence.hash_chain.hash_of(index, sequence.token_ids, block_size)
                assert is_right, f"block {block_id} is not found by the tokens of sequence {sequence.sequence_id}"

    def _take_out(self, queue: list[Sequence], sequence: Sequence) -> None:
        index = bisect_left(queue, sequence.service_order, key=_order)
        assert queue[index] is sequence, f"sequence {sequence.sequence_id} is not where its order says"
        del queue[index]

    def _count_prefix(self, sequence: Sequence) -> None:
        """Count what a request finds when it is first admitted, not when it comes back from a preemption."""
        if sequence.num_discarded_tokens == 0:  # whoever was preempted had computed a token
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_prefix_query_tokens += len(sequence.token_ids)
            self.num_prefix_hit_tokens += sequence.num_computed_tokens

    def _free_blocks(self, sequence: Sequence) -> None:
        self.allocator.free(sequence.block_ids)
        sequence.block_ids = ()


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.service_order
