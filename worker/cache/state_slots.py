"""State slots: where the states of sequences are, and which slots hold a snapshot of one for a prefix.

A model may have layers that keep a state of fixed size in place of keys and values (docs/state-cache.md). A sequence
that runs owns one slot for the states of all of them. A slot without an owner may hold a snapshot: the state behind the
first blocks of some sequence, found by the same hash as the last of these blocks. Slots are handed out and evicted like
blocks, and from the same memory: a slot in use occupies the memory of several blocks of keys and values, and the least
recently used block or snapshot is evicted first.
"""

from collections.abc import Collection, Iterable, Sequence

from holdfast.worker.block_hash import HashChain
from holdfast.worker.cache.block_pool import Age, BlockAllocator
from holdfast.worker.cache.prefix_cache import CacheEvent
from holdfast.worker.step_plan import StateCopy


class StateSlots:
    """Slots 0 to `num_slots - 1`. Every call but `deepest` costs O(1).

    Copies are made before the next step computes anything, in the order of the calls: a copy has the slot's content at
    the call, also if another sequence has the slot by then.
    """

    def __init__(
        self,
        num_slots: int,
        blocks: BlockAllocator,
        blocks_per_slot: int = 0,
        *,
        max_num_pins: int = 0,
    ) -> None:
        """Keeps snapshots where `blocks` have a prefix cache. `blocks_per_slot`: number of blocks whose memory one slot
        occupies; 0: slots have separate memory. `max_num_pins`: snapshots that a tenant may have pinned.
        """
        self.keeps_snapshots = blocks.prefix_cache.enabled
        self._allocator = BlockAllocator(
            num_slots,
            blocks.block_size,
            prefix_caching=self.keeps_snapshots,
            max_num_pins=max_num_pins,
            clock=blocks.clock,
        )
        self._cache = self._allocator.prefix_cache
        self._copies: list[StateCopy] = []
        self.blocks_per_slot = blocks_per_slot
        self._blocks = blocks
        self._lent: dict[int, list[int]] = {}  # by slot, the blocks that it takes the place of
        self._idle_blocks: set[int] = set()  # lent since memory was last given back
        self._idle_slots: set[int] = set()  # blank since then
        if blocks_per_slot:
            blocks.borrower = self

    @property
    def num_slots(self) -> int:
        return self._allocator.num_blocks

    @property
    def num_free(self) -> int:
        """Slots that can be had: without an owner, those with a snapshot among them, as far as there is memory."""
        if not self.blocks_per_slot:
            return self._allocator.num_free
        return min(self._allocator.num_free, self._blocks.num_free // self.blocks_per_slot)

    @property
    def num_cached(self) -> int:
        """Slots with a snapshot."""
        return self._allocator.num_cached

    @property
    def num_evictions(self) -> int:
        return self._cache.num_evictions

    def deepest(self, chain: HashChain, token_ids: Sequence[int], max_num_blocks: int) -> tuple[int, int | None]:
        """Number of blocks before the deepest snapshot of this prefix, at most `max_num_blocks`, and its slot; (0,
        None) without a snapshot. O(`max_num_blocks`).
        """
        for num_blocks in range(max_num_blocks if self.num_cached else 0, 0, -1):
            slot = self._cache.place_of(chain, token_ids, num_blocks - 1)
            if slot is not None:
                return num_blocks, slot
        return 0, None

    def pin(self, slot: int, tenant: str, until_s: float) -> None:
        """Until then, evicts a snapshot after all unpinned ones."""
        self._allocator.pin([slot], tenant, until_s)

    def unpin(self, block_hashes: Collection[bytes], tenant: str) -> None:
        """Ends a tenant's pins of the snapshots behind these blocks."""
        found = self._cache.contents
        slots = self._allocator.pins.of(tenant)
        self._allocator.unpin([slot for slot in slots if found[slot].block_hash in block_hashes])

    def unpin_all(self, tenant: str) -> None:
        """Ends all pins of a tenant."""
        self._allocator.unpin(self._allocator.pins.of(tenant))

    def end_pins(self, now: float) -> None:
        """Ends the pins whose time is up."""
        self._allocator.end_pins(now)

    @property
    def next_end_s(self) -> float:
        """Time at which `end_pins` may have something to do; infinite without pins."""
        return self._allocator.pins.next_end_s

    def take(self) -> int:
        """A slot for a sequence that begins. Its contents are undefined."""
        if not self._allocator.num_blank:
            self._evict_next()
        lent = self._blocks.lend(self.blocks_per_slot) if self.blocks_per_slot else []
        (slot,) = self._allocator.allocate(1)
        if lent:
            self._lent[slot] = lent
            self._idle_blocks.update(lent)
            self._idle_slots.discard(slot)
        return slot

    def take_copy(self, source: int) -> int:
        """A slot with the state that is in `source`: a snapshot's, or that of a sequence that runs."""
        self._use(source)
        slot = self.take()
        if slot != source:  # else it was the last free one, and is the sequence's own from now on
            self._copies.append((source, slot))
        return slot

    def give_back(self, slot: int) -> None:
        """The sequence has ended, or is preempted."""
        self._free(slot)

    def renew(
        self, chain: HashChain, token_ids: Sequence[int], num_blocks: Iterable[int], *, is_extended: bool
    ) -> None:
        """Marks the snapshots after these numbers of blocks as used now, in order. `is_extended` as of
        `BlockAllocator.free`.
        """
        for count in num_blocks:
            if (slot := self._cache.place_of(chain, token_ids, count - 1)) is not None:
                self._use(slot, is_extended=is_extended)

    def keep(
        self, slot: int, chain: HashChain, token_ids: Sequence[int], num_blocks: int, *, is_extended: bool = False
    ) -> bool:
        """Keeps a copy of the state in `slot`, computed up to this number of full blocks, as a snapshot under their
        hash. False where there is one already, or no slot is free. `is_extended` as of `BlockAllocator.free`.
        """
        if not self.keeps_snapshots or not self.num_free:
            return False
        if self._cache.place_of(chain, token_ids, num_blocks - 1) is not None:
            return False
        kept = self.take()
        self._copies.append((slot, kept))
        self._cache.store(kept, chain, token_ids, num_blocks - 1)
        self._free(kept, is_extended=is_extended)
        return True

    def drop(self, chain: HashChain, token_ids: Sequence[int], num_blocks: int) -> None:
        """Drops the snapshot after this number of blocks, if there is one."""
        slot = self._cache.place_of(chain, token_ids, num_blocks - 1)
        if slot is not None:
            self._allocator.make_blank(slot)
            self._vacate(slot)

    def put(self, slot: int, chain: HashChain, token_ids: Sequence[int], num_blocks: int) -> None:
        """Turns an owned slot with the state after this number of blocks into a snapshot under their hash, without an
        owner.
        """
        if self._cache.place_of(chain, token_ids, num_blocks - 1) is None:
            self._cache.store(slot, chain, token_ids, num_blocks - 1)
        self._free(slot)

    def holder_of(self, block_hash: bytes) -> int | None:
        """The slot with the state of a snapshot, by its hash, as slots are before the next step's copies are made."""
        slot = self._cache.block_of(block_hash)
        for source, destination in reversed(self._copies):
            if destination == slot:
                slot = source
        return slot

    @property
    def snapshot_hashes(self) -> Iterable[bytes]:
        """Hashes of the last blocks before all snapshots."""
        return self._cache.block_hashes

    def take_events(self) -> list[CacheEvent]:
        """The snapshots that came and went since the last call."""
        return self._cache.take_events()

    def take_copies(self) -> tuple[StateCopy, ...]:
        """The copies that the next step makes; each is returned once."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def take_idle(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Blocks and slots without content after the pending copies, whose memory is returned for other uses; each is
        returned once.
        """
        idle = tuple(sorted(self._idle_blocks)), tuple(sorted(self._idle_slots))
        self._idle_blocks.clear()
        self._idle_slots.clear()
        return idle

    def forget_cached(self) -> None:
        """Forgets all snapshots. No slot may have an owner."""
        self._allocator.forget_cached()
        for slot in list(self._lent):
            self._vacate(slot)

    # --- as the borrower of blocks ---

    @property
    def num_idle(self) -> int:
        """Blocks in whose place snapshots are."""
        return self.blocks_per_slot * self._allocator.num_cached

    @property
    def num_lasting(self) -> int:
        """Blocks in whose place snapshots of extended prefixes are."""
        return self.blocks_per_slot * self._allocator.num_lasting

    def make_way(self, age: Age | None) -> bool:
        """Evicts the oldest snapshot, if it is older than this."""
        oldest = self._allocator.oldest
        if oldest is None or (age is not None and age < oldest):
            return False
        self._evict_next()
        return True

    def note_evicted(self, block_hash: bytes) -> None:
        """Evicts the snapshot behind a block that was evicted: it cannot be reached without it."""
        if (slot := self._cache.block_of(block_hash)) is not None and self._allocator.ref_count(slot) == 0:
            self._allocator.forget(slot)
            self._vacate(slot)

    def _use(self, slot: int, *, is_extended: bool = False) -> None:
        """A snapshot is evicted after all others of its kind now."""
        if self._allocator.ref_count(slot) == 0:
            self._allocator.share([slot])
            self._allocator.free([slot], is_extended=is_extended)

    def _evict_next(self) -> None:
        slot = self._allocator.evict_next()
        assert slot is not None, "slots have separate memory"
        self._vacate(slot)

    def _free(self, slot: int, *, is_extended: bool = False) -> None:
        self._allocator.free([slot], is_extended=is_extended)
        if not self._allocator.is_cached(slot):
            self._vacate(slot)

    def _vacate(self, slot: int) -> None:
        """The slot is blank: blocks have their place again."""
        if (lent := self._lent.pop(slot, None)) is not None:
            self._blocks.take_back(lent)
            self._idle_blocks.difference_update(lent)
            self._idle_slots.add(slot)

    # --- state ---

    @property
    def lent(self) -> Iterable[int]:
        """Blocks that slots take the place of."""
        return (block_id for lent in self._lent.values() for block_id in lent)

    def stats(self) -> dict[str, int]:
        """Counts by their names in `EngineStats`."""
        return {
            "num_used_slots": self._allocator.num_used,
            "num_cached_slots": self.num_cached,
            "num_total_slots": self.num_slots,
            "num_snapshot_evictions": self.num_evictions,
        }

    def check_integrity(self, owned: Sequence[int]) -> None:
        """Raises AssertionError unless these slots, and no others, have one owner each. O(slots)."""
        self._allocator.check_integrity()
        owners = [self._allocator.ref_count(slot) for slot in range(self.num_slots)]
        expected = [0] * self.num_slots
        for slot in owned:
            expected[slot] += 1
        assert owners == expected, f"slots have {owners} owners, and {expected} were counted"
        assert max(expected, default=0) <= 1, "two sequences have one slot"
        busy = {slot for slot in range(self.num_slots) if owners[slot] or self._allocator.is_cached(slot)}
        lent = self._lent.keys() if self.blocks_per_slot else busy
        assert lent == busy, f"slots {sorted(lent ^ busy)} are blank in the place of blocks, or busy and in none"
