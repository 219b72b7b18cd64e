"""Sequence queues: the waiting and the running sequences in order of service, and the blocks they own.

Only here does a sequence change its status, and only here are blocks allocated to sequences and freed; each method
keeps `check_integrity` true.
"""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from operator import attrgetter
from typing import Final

from holdfast.worker.block_hash import HashChain
from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.cache.window_blocks import WindowBlocks
from holdfast.worker.scheduler.kept_prefixes import Pinning, SharedPrefix, cuts_of, renew_states
from holdfast.worker.scheduler.sequence import Sequence, SequenceStatus
from holdfast.worker.step_plan import BlockCopy
from holdfast.worker.step_update import EngineStats
from holdfast.worker.waiting_queue import TenantCounters, WaitingQueue

NOTHING = SharedPrefix()

_service_order: Final = attrgetter("service_order")


class SequenceQueues:
    """`running` is sorted by `Sequence.service_order`; others read it and `waiting`, and change them only from here.

    A sorted list rather than a heap: its length is bounded by the settings, moving a thousand pointers costs less than
    a microsecond, and the first, the last and any aborted one are at hand.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        slots: StateSlots | None = None,
        windows: WindowBlocks | None = None,
        turn_ends: frozenset[int] = frozenset(),
        aging_s: float = math.inf,
        tenant_shares: Mapping[str, float] | None = None,
    ) -> None:
        """`slots`: of a model that keeps states. `windows`: window layers, if they have separate blocks.
        `turn_ends`: tokens that end a turn of a chat.
        """
        self.allocator = allocator
        self.slots = slots
        self.windows = windows
        self.pinning = Pinning(allocator, slots, windows)
        self._turn_ends = turn_ends
        self.waiting = WaitingQueue[Sequence](TenantCounters(tenant_shares or {}), aging_s)
        self.running: list[Sequence] = []
        self.num_moves = 0
        """Changes whenever a sequence begins or stops to run."""
        self.num_uncomputed_tokens = 0
        """Uncomputed tokens of all sequences that have not ended. Code that computes tokens of one counts them here."""
        self.counts = EngineStats()
        """Counts by the scheduler and the engine, in place."""
        self._copies: dict[int, BlockCopy] = {}  # of the coming step, by destination
        self._window_copies: dict[int, BlockCopy] = {}  # likewise, in layers with a window
        self._in_flight: list[list[Sequence]] = []  # who is in each step whose result is to come, the oldest step first
        self._held: list[Sequence] = []  # ended, with blocks that a step in flight writes to

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence to the waiting."""
        self.waiting.add(sequence)
        self.num_uncomputed_tokens += sequence.num_uncomputed_tokens

    def cached_prefix(self, sequence: Sequence) -> SharedPrefix:
        """The cached full blocks that a waiting sequence can begin with: of a model that keeps states, those up to the
        deepest snapshot; of one with windows, those behind which all is there that the next token sees.
        """
        size = self.allocator.block_size
        max_num_blocks = sequence.num_skippable_tokens // size
        if not max_num_blocks:
            return NOTHING
        found = self.allocator.prefix_cache.find(sequence.hash_chain, sequence.token_ids, max_num_blocks)
        if self.windows is not None:
            known = len(found) * size
            chain = self._window_chain(sequence)
            num_tokens, seen = self.windows.find(chain, sequence.token_ids, known)
            prefix = tuple(found[: num_tokens // size])
            return SharedPrefix(prefix, num_tokens, num_known_tokens=known, window=seen)
        if self.slots is None:
            return SharedPrefix(tuple(found), len(found) * size)
        count, snapshot = self.slots.deepest(sequence.hash_chain, sequence.token_ids, len(found))
        return SharedPrefix(tuple(found[:count]), count * size, None, snapshot, len(found) * size)

    def admit(self, sequence: Sequence, num_blocks: int, prefix: SharedPrefix = NOTHING) -> None:
        """Moves a waiting sequence to the running, with `num_blocks` blocks in all, those of the prefix included.

        A block has several owners only once all of them have filled it: a fork writes to the parent's last block at its
        first step, so it gets a copy of it at once, and never owns the original.
        """
        self.waiting.remove(sequence)
        self.num_moves += 1
        self.num_uncomputed_tokens -= prefix.num_tokens
        if prefix.block_ids:
            self.allocator.share(prefix.block_ids)
        if self.windows is not None:  # before anything is allocated, for which a cached block could be evicted
            self._begin_window(self.windows, sequence, prefix)
        sequence.num_computed_tokens = prefix.num_tokens
        if self.slots is not None:  # likewise, for which a snapshot could be
            self._give_slot(self.slots, sequence, prefix)
        own = self.allocator.allocate(num_blocks - len(prefix.block_ids))
        sequence.block_ids = (*prefix.block_ids, *own)
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_service_order)
        if prefix.parent is not None and (num_tokens := prefix.num_tokens % self.allocator.block_size):
            _copy(self._copies, prefix.parent.block_ids[len(prefix.block_ids)], own[0], num_tokens)
        self._count_prompt(sequence, prefix.parent)
        if sequence.to_pin:
            self.pinning.pin(sequence)

    def take_off(self, sequences: list[Sequence]) -> None:
        """A step is planned that writes to the blocks of these: they are not freed before it has landed."""
        self._in_flight.append(sequences)

    def land(self) -> None:
        """The oldest step in flight has been computed."""
        self._in_flight.pop(0)
        if self._held:
            held, self._held = self._held, []
            for sequence in held:
                self._free_or_hold(sequence)

    def take_block_copies(self) -> tuple[BlockCopy, ...]:
        """The block copies that the next step makes before it computes; each is returned once."""
        return _taken(self._copies) if self._copies else ()

    def take_window_copies(self) -> tuple[BlockCopy, ...]:
        """The same of layers with a window."""
        return _taken(self._window_copies)

    @property
    def num_free(self) -> int:
        """Free blocks that are not reserved."""
        return self.allocator.num_free - (0 if self.windows is None else self.windows.num_owed)

    def num_promised_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of at most this many tokens takes besides the ones of full-attention layers: its
        reserved ones, and the ones that its state occupies.
        """
        if self.slots is not None:
            return self.slots.blocks_per_slot
        return 0 if self.windows is None else self.windows.window.most_blocks(num_tokens)

    def grow(self, sequence: Sequence, num_blocks: int = 1) -> None:
        """Allocates more blocks for a running sequence."""
        sequence.block_ids += tuple(self.allocator.allocate(num_blocks))

    def shrink(self, sequence: Sequence, num_blocks: int) -> None:
        """Frees the last blocks of a running sequence, which hold no computed token."""
        kept = len(sequence.block_ids) - num_blocks
        self.allocator.free(sequence.block_ids[kept:])
        sequence.block_ids = sequence.block_ids[:kept]

    def extend_window(self, sequence: Sequence, num_tokens: int) -> int:
        """Tokens, at most `num_tokens` and at least one, that a step can compute given the blocks of layers with a
        window, which are allocated.
        """
        if self.windows is None or sequence.window is None:
            return num_tokens
        first = sequence.num_computed_tokens
        end = min(first + num_tokens, self.windows.room(sequence.window))
        assert end > first, f"sequence {sequence.sequence_id} does not get what it was promised"
        self.windows.extend(sequence.window, end)
        return end - first

    def store_full_blocks(self, sequence: Sequence, first_position: int) -> None:
        """Adds the blocks that a running sequence has filled, from `first_position` on, to the prefix cache, and
        returns blocks that no window reaches any longer.
        """
        block_size, end = self.allocator.block_size, sequence.num_computed_tokens
        for index in range(first_position // block_size, end // block_size):
            self.allocator.prefix_cache.store(sequence.block_ids[index], sequence.hash_chain, sequence.token_ids, index)
        if self.windows is not None and sequence.window is not None:
            self.windows.store(sequence.window, sequence.token_ids, first_position, end)
            self.windows.give_back(sequence.window, end)

    @property
    def fill_size(self) -> int:
        """A block may be sealed only where a sequence has a multiple of this many tokens."""
        size = self.allocator.block_size
        return size if self.windows is None else min(size, self.windows.window.block_size)

    def preempt(self, sequence: Sequence) -> None:
        """Preempts a running sequence. It keeps its outputs and loses all computed blocks, except what the prefix cache
        still has when it returns.

        It goes back to the class that it ran in, and to its old place in its tenant's line. Not while a step is in
        flight, which may write to its blocks.
        """
        assert not self._in_flight, "no sequence is preempted while a step is in flight"
        self._take_out(sequence)
        self.num_uncomputed_tokens += sequence.num_computed_tokens
        sequence.num_discarded_tokens = max(sequence.num_discarded_tokens, sequence.num_computed_tokens)
        sequence.num_computed_tokens = 0
        self._free_blocks(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)
        self.counts.num_preemptions += 1

    def remove(self, sequence: Sequence) -> None:
        """Removes a waiting or running sequence and frees its blocks, once no step in flight writes to them."""
        if sequence.status is SequenceStatus.RUNNING:
            self._take_out(sequence)
        else:
            self.waiting.remove(sequence)
        self.finish(sequence)
        self._free_or_hold(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence. If it runs, it keeps its place and its blocks until `release_finished`."""
        sequence.status = SequenceStatus.FINISHED
        self.num_uncomputed_tokens -= sequence.num_uncomputed_tokens

    def forget_prefix(self, sequence: Sequence) -> None:
        """Evicts a running sequence's blocks from the prefix cache, both those it computed and those it found, and the
        snapshots of its states.
        """
        for block_id in filter(self.allocator.is_cached, sequence.block_ids):
            self.allocator.forget(block_id)
        if self.windows is not None and sequence.window is not None:
            self.windows.forget(sequence.window.chain, sequence.token_ids, sequence.num_computed_tokens)
        if self.slots is not None and self.slots.keeps_snapshots:
            for num_blocks in range(1, sequence.num_computed_tokens // self.allocator.block_size + 1):
                self.slots.drop(sequence.hash_chain, sequence.token_ids, num_blocks)

    def release_finished(self) -> None:
        """Removes finished sequences from `running` and frees their blocks, once no step in flight writes to them."""
        before, self.running = self.running, []
        for sequence in before:
            if sequence.status is SequenceStatus.RUNNING:
                self.running.append(sequence)
            else:
                self._free_or_hold(sequence)
        self.num_moves += 1

    def num_wasted_slots(self) -> int:
        """Allocated slots without a token of their sequence so far; of a finished sequence, all."""
        block_size = self.allocator.block_size
        wasted = 0  # shared blocks are full, so none is counted twice
        for sequence in self.running:
            num_tokens = len(sequence.token_ids) if sequence.status is SequenceStatus.RUNNING else 0
            wasted += max(0, len(sequence.block_ids) * block_size - num_tokens)
        return wasted

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, states and orders agree. O(blocks + sequences)."""
        self.allocator.check_integrity()
        owning = (*self.running, *self._held)
        owners = Counter(block_id for sequence in owning for block_id in sequence.block_ids)
        tables = [sequence.window for sequence in owning if sequence.window is not None]
        owners.update(block_id for table in tables for block_id in table.own)
        owners.update(() if self.slots is None else self.slots.lent)
        if self.windows is not None:
            assert len(tables) == len(owning), "a running sequence has no table of layers with a window"
            self.windows.check_integrity(tables)
        for block_id in range(self.allocator.num_blocks):
            counted, found = self.allocator.ref_count(block_id), owners[block_id]
            assert counted == found, f"block {block_id} has {found} owners and a reference count of {counted}"
        self._check_slots()
        self.waiting.check_integrity()
        for sequence in self._held:
            assert any(sequence in members for members in self._in_flight), "blocks are held for no step in flight"
        for before, after in pairwise(self.running):
            assert before.service_order < after.service_order, f"{after.sequence_id} stands behind its turn"
        for sequence in self.waiting:
            assert sequence.status is SequenceStatus.WAITING, f"waiting {sequence.sequence_id} is {sequence.status}"
            assert not sequence.block_ids, f"waiting sequence {sequence.sequence_id} owns blocks"
            assert sequence.state_slot is None, f"waiting sequence {sequence.sequence_id} owns a slot"
            assert sequence.window is None, f"waiting sequence {sequence.sequence_id} has blocks of windows"
            assert sequence.num_computed_tokens == 0, f"waiting sequence {sequence.sequence_id} has computed tokens"
        for sequence in self.running:
            assert sequence.status is not SequenceStatus.WAITING, f"running sequence {sequence.sequence_id} waits"
            self._check_blocks(sequence)

    def _check_slots(self) -> None:
        """Every sequence that owns blocks owns a slot, of a model that keeps states."""
        owned = [sequence.state_slot for sequence in (*self.running, *self._held)]
        if self.slots is None:
            assert set(owned) <= {None}, "a sequence owns a slot where there are none"
        else:
            assert None not in owned, "a running sequence owns no slot"
            self.slots.check_integrity([slot for slot in owned if slot is not None])

    def _window_chain(self, sequence: Sequence) -> HashChain:
        """Hashes of its blocks of layers with a window. They are computed again if it waits again."""
        assert self.windows is not None
        is_same, request = self.windows.window.block_size == self.allocator.block_size, sequence.request
        return sequence.hash_chain if is_same else HashChain(request.cache_salt, request.tenant, request.adapter_digest)

    def _begin_window(self, windows: WindowBlocks, sequence: Sequence, prefix: SharedPrefix) -> None:
        """Begins its table of layers with a window: others are likely to begin where this prefix ends, or where its
        keys and values are known to, and where its prompt does.
        """
        spacing = windows.window.spacing
        ends = {prefix.num_tokens, prefix.num_known_tokens, sequence.num_prompt_tokens - 1}
        ends.update(kept.num_tokens for kept in sequence.to_pin)
        ends = {end // spacing * spacing for end in ends}
        chain = self._window_chain(sequence)
        table = sequence.window = windows.begin(sequence.max_num_slots, prefix.window, chain, ends)
        num_tokens = prefix.num_tokens % windows.window.block_size
        if prefix.parent is not None and prefix.parent.window is not None and num_tokens:
            number = len(table.block_ids)
            windows.extend(table, prefix.num_tokens)
            _copy(self._window_copies, prefix.parent.window.block_ids[number], table.block_ids[-1], num_tokens)

    def _give_slot(self, slots: StateSlots, sequence: Sequence, prefix: SharedPrefix) -> None:
        """Gives a slot: its state is the parent's, the snapshot's, or none yet."""
        source = prefix.snapshot if prefix.parent is None else prefix.parent.state_slot
        sequence.state_slot = slots.take() if source is None else slots.take_copy(source)
        sequence.num_admitted_tokens = len(sequence.token_ids)
        block_size, keeps = self.allocator.block_size, slots.keeps_snapshots
        sequence.cuts = cuts_of(
            sequence, block_size, prefix.num_known_tokens, keeps_snapshots=keeps, turn_ends=self._turn_ends
        )
        if prefix.snapshot is not None and sequence.num_discarded_tokens == 0:
            self.counts.num_snapshot_hits += 1

    def _check_blocks(self, sequence: Sequence) -> None:
        """Blocks that a running sequence may still write to are its own and not cached; cached ones hold its tokens."""
        block_size, cache = self.allocator.block_size, self.allocator.prefix_cache
        num_full = sequence.num_computed_tokens // block_size
        num_slots = len(sequence.block_ids) * block_size
        assert sequence.num_computed_tokens <= num_slots, f"sequence {sequence.sequence_id} has too few blocks"
        for index, block_id in enumerate(sequence.block_ids):
            if index >= num_full:
                is_own = self.allocator.ref_count(block_id) == 1 and block_id not in cache.contents
                assert is_own, f"block {block_id} is shared before sequence {sequence.sequence_id} has filled it"
            elif (found := cache.hash_in(block_id)) is not None:
                is_right = found == sequence.hash_chain.hash_of(index, sequence.token_ids, block_size)
                assert is_right, f"block {block_id} is not found by the tokens of sequence {sequence.sequence_id}"

    def _take_out(self, sequence: Sequence) -> None:
        index = bisect_left(self.running, sequence.service_order, key=_service_order)
        assert self.running[index] is sequence, f"sequence {sequence.sequence_id} is not where its order says"
        del self.running[index]
        self.num_moves += 1

    def _count_prompt(self, sequence: Sequence, parent: Sequence | None) -> None:
        """Counts a request's cached tokens and cost at its first admission, not after a preemption.

        A fork makes no lookup in the cache: its number of cached tokens is that of the sequence which made it.
        """
        if parent is not None:
            self.counts.num_forked_tokens += sequence.num_computed_tokens
        if sequence.num_discarded_tokens > 0:  # a preempted sequence had computed a token
            return
        sequence.queued_s = sequence.waited_s
        if parent is not None:
            sequence.num_cached_tokens = min(parent.num_cached_tokens, sequence.num_computed_tokens)
        else:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.counts.num_prefix_query_tokens += len(sequence.token_ids)
            self.counts.num_prefix_hit_tokens += sequence.num_computed_tokens
        sequence.num_disk_tokens = min(sequence.num_disk_tokens, sequence.num_cached_tokens)
        sequence.tenant.charge(sequence.num_uncomputed_tokens, 0)

    def _free_or_hold(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence that has ended, at once or when the last step in flight that has it lands."""
        if self._in_flight and any(sequence in members for members in self._in_flight):
            self._held.append(sequence)
        else:
            self._free_blocks(sequence)

    def _free_blocks(self, sequence: Sequence) -> None:
        for block_id in sequence.block_ids if self._copies else ():
            self._copies.pop(block_id, None)
        self.allocator.free(sequence.block_ids, is_extended=sequence.is_extended)
        sequence.block_ids = ()
        if self.windows is not None and sequence.window is not None:
            for block_id in sequence.window.own if self._window_copies else ():
                self._window_copies.pop(block_id, None)
            self.windows.end(sequence.window)
            sequence.window = None
        if self.slots is not None and sequence.state_slot is not None:
            self.slots.give_back(sequence.state_slot)
            renew_states(sequence, self.slots, self.allocator.block_size)
            sequence.state_slot = None


def _copy(copies: dict[int, BlockCopy], source: int, destination: int, num_tokens: int) -> None:
    """The source may be a copy that has not been made yet: then it is the original that is copied again."""
    if (earlier := copies.get(source)) is not None:
        assert num_tokens <= earlier.num_tokens, f"block {source} will not hold {num_tokens} tokens to copy"
        source = earlier.source
    copies[destination] = BlockCopy(source=source, destination=destination, num_tokens=num_tokens)


def _taken(copies: dict[int, BlockCopy]) -> tuple[BlockCopy, ...]:
    """All of them, which are forgotten."""
    taken = tuple(copies.values())
    copies.clear()
    return taken
