"""Who owns which block of the paged KV cache: ids and reference counts, in plain integers.

What may not live here: tensors, sequences, policy. Callers allocate, share and free; which free block is handed out,
and what it may still hold, is this file's own affair: a prefix cache can keep unreferenced blocks here, count them as
free and evict them in `allocate` without any caller noticing.
"""

from collections.abc import Sequence


class BlockAllocator:
    """Blocks 0 to `num_blocks - 1`, each free or held by as many owners as its reference count says.

    Every call costs O(1) per block, and the ids handed out depend on the calls alone. A call that breaks the rules
    (more blocks than are free, an id that is not allocated) is our own mistake and an AssertionError at once.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, f"{num_blocks = } must be positive"
        assert block_size > 0, f"{block_size = } must be positive"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        # A stack with the lowest id on top. Blocks freed together come out together and in the same order, so that
        # sequences hold runs of neighbours, which are gathered faster, and the blocks used last are still cached.
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold positions 0 to `num_tokens - 1`."""
        return -(-num_tokens // self.block_size)

    def ref_count(self, block_id: int) -> int:
        """Owners of a block; 0 for a free one."""
        assert 0 <= block_id < self.num_blocks, f"block {block_id} is not one of the {self.num_blocks} blocks"
        return self._ref_counts[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, each with one owner. The caller has looked at `num_free` before."""
        assert 0 <= num_blocks <= self.num_free, f"{num_blocks} blocks asked for, {self.num_free} are free"
        num_left = self.num_free - num_blocks
        block_ids = self._free[num_left:]
        del self._free[num_left:]
        block_ids.reverse()
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one owner to each of these allocated blocks."""
        for block_id in block_ids:
            assert self.ref_count(block_id) > 0, f"block {block_id} is shared but not allocated"
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Take one owner from each of these blocks; a block without owners is free again."""
        for block_id in reversed(block_ids):
            assert self.ref_count(block_id) > 0, f"block {block_id} is freed but not allocated"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is either free, once, or owned. O(`num_blocks`)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert free <= set(range(self.num_blocks)), (
            f"foreign ids in the free list: {free - set(range(self.num_blocks))}"
        )
        for block_id, ref_count in enumerate(self._ref_counts):
            assert ref_count >= 0, f"block {block_id} has {ref_count} owners"
            assert (ref_count == 0) == (block_id in free), (
                f"block {block_id} has {ref_count} owners and is {'' if block_id in free else 'not '}in the free list"
            )
