"""Pinning: what the cache holds of a prefix that a request asks to keep, found and pinned once all of it is there."""

from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.cache.window_blocks import WindowBlocks
from holdfast.worker.scheduler.sequence import Sequence


class Pinning:
    """Pins the full blocks of prefixes; of a model that keeps states, the deepest snapshot in it; of one with windows,
    the blocks that the token behind it sees. Its clock is that of `Scheduler.plan`.
    """

    def __init__(self, allocator: BlockAllocator, slots: StateSlots | None, windows: WindowBlocks | None) -> None:
        self._allocator, self._slots, self._windows = allocator, slots, windows
        self.now = 0.0
        """Time of the plan that is being made."""
        self.next_end_s = float("inf")
        """Time at which `end` may have something to do."""

    def end(self, now: float) -> None:
        """Pins end whose time is up."""
        self._allocator.end_pins(now)
        self.next_end_s = self._allocator.pins.next_end_s
        if self._slots is not None:
            self._slots.end_pins(now)
            self.next_end_s = min(self.next_end_s, self._slots.next_end_s)

    def pin(self, sequence: Sequence) -> None:
        """Pins the prefixes that a running sequence's request asks to keep, once all their full blocks are computed;
        each once. O(blocks).
        """
        while sequence.to_pin:
            num_tokens, ttl_s = sequence.to_pin[0]
            num_blocks = num_tokens // self._allocator.block_size
            if sequence.num_computed_tokens < num_blocks * self._allocator.block_size:
                return
            sequence.to_pin = sequence.to_pin[1:]
            if num_blocks:
                self._pin(sequence, num_blocks, self.now + ttl_s)

    def _pin(self, sequence: Sequence, num_blocks: int, until_s: float) -> None:
        tokens, chain, request = sequence.token_ids, sequence.hash_chain, sequence.request
        self.next_end_s = min(self.next_end_s, until_s)
        seen = self._seen_behind(sequence, num_blocks)
        found = self._allocator.prefix_cache.find(chain, tokens, num_blocks)
        self._allocator.pin([*found, *seen], request.tenant, until_s)
        if self._slots is not None:
            _, slot = self._slots.deepest(chain, tokens, len(found))
            if slot is not None:
                self._slots.pin(slot, request.tenant, until_s)

    def _seen_behind(self, sequence: Sequence, num_blocks: int) -> tuple[int, ...]:
        """Cached blocks of layers with a window that the token behind so many blocks sees."""
        if self._windows is None or sequence.window is None:
            return ()
        longest = num_blocks * self._allocator.block_size
        return self._windows.find(sequence.window.chain, sequence.token_ids, longest)[1].block_ids
