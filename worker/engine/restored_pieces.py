"""Pieces of restores: puts blocks that were read, or received, into the cache. A core without IO.

Restored blocks have no owner until their request is admitted, so running requests come first. But they count as blocks
of an extended prefix, used now: blocks of prefixes that were used before are evicted earlier.
"""

from collections.abc import Callable, Sequence

from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.engine.restore import Restore
from holdfast.worker.engine.tier_mover import STATE, Mover, TierShape
from holdfast.worker.step_plan import StateCopy


class RestoredPieces:
    """Places of restored blocks on the leader's engine. Used by one thread."""

    def __init__(
        self,
        allocator: BlockAllocator,
        slots: StateSlots | None,
        mover: Mover,
        shape: TierShape,
        lose: Callable[[bytes], None],
    ) -> None:
        """`lose` is called with a name that the store turns out not to have."""
        self._allocator = allocator
        self._cache = allocator.prefix_cache
        self._slots = slots
        self._mover = mover
        self._shape = shape
        self._lose = lose

    def note_use(self, restore: Restore) -> None:
        """Notes a use of the cached blocks that a restore continues. Else its own blocks could evict them."""
        before = self._before(restore)
        self._allocator.share(before)
        self._allocator.free(before, is_extended=True)

    def has_room(self, restore: Restore) -> bool:
        """Whether the next piece fits beside running requests, and beside the cached blocks before it."""
        blocks, of_state = self._next(restore)
        num_idle = sum(not self._allocator.ref_count(block_id) for block_id in self._before(restore))
        return len(blocks) + self._blocks_of_slot(of_state) <= self._allocator.num_free - num_idle

    def take_next(self, restore: Restore) -> int:
        """Puts the next piece, which has room, in its places; its bytes."""
        restore.num_ready -= 1
        blocks, of_state = self._next(restore)
        first, before = restore.first + restore.num_taken, self._before(restore)
        has_slot = of_state is None or (self._slots is not None and self._slots.num_free > 0)
        if len(before) < first or not has_slot:
            restore.has_failed = True
            return 0
        self._allocator.share(before)
        own = self._allocator.allocate(len(blocks))
        places = list(zip(blocks, own, strict=True))
        slot: int | None = None
        copies: Sequence[StateCopy] = ()
        if of_state and self._slots is not None:
            slot = self._slots.take()
            copies = self._slots.take_copies()
            places.append((of_state, slot))
        found = self._mover.take(restore.ticket, places, copies)
        self._keep(restore, first, own, slot, found)
        self._allocator.free([*before, *own], is_extended=True)
        for (name, _), is_there in zip(places, found, strict=True):
            if not is_there:
                self._lose(name)
        return sum(self._shape.bytes_of(name) for name, _ in places)

    def _next(self, restore: Restore) -> tuple[Sequence[bytes], bytes | None]:
        """Names of the next piece's keys and values, and of the state behind them."""
        names = restore.names[restore.num_taken : restore.num_taken + self._shape.piece]
        of_state = names[-1] if names[-1].startswith(STATE) else None
        return (names[:-1] if of_state else names), of_state

    def _before(self, restore: Restore) -> list[int]:
        """Cached blocks before the next piece."""
        return self._cache.find(restore.chain, restore.token_ids, restore.first + restore.num_taken)

    def _blocks_of_slot(self, of_state: bytes | None) -> int:
        return 0 if of_state is None or self._slots is None else self._slots.blocks_per_slot

    def _keep(self, restore: Restore, first: int, own: Sequence[int], slot: int | None, found: Sequence[bool]) -> None:
        """The first blocks that are there, without a gap, can be found from now on; a state if all of them are."""
        chain, token_ids = restore.chain, restore.token_ids
        num_found = next((number for number, is_there in enumerate(found) if not is_there), len(found))
        for index, block_id in enumerate(own[:num_found], first):
            self._cache.store(block_id, chain, token_ids, index)
        if slot is not None and self._slots is not None:
            if num_found == len(found):
                self._slots.put(slot, chain, token_ids, restore.depth)
            else:
                self._slots.give_back(slot)
        restore.num_taken += num_found
        restore.has_failed = num_found < len(found)
