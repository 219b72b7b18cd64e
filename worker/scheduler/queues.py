"""Sequence queues: the waiting and the running sequences in order of service, and the blocks they own.

Only here does a sequence change its status, and only here are blocks allocated to sequences and freed; each method
keeps `check_integrity` true.
"""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Final

from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import EngineRequest
from holdfast.worker.scheduler.sequence import Sequence, SequenceStatus
from holdfast.worker.scheduler.snapshots import cuts_of
from holdfast.worker.step_plan import BlockCopy
from holdfast.worker.step_update import EngineStats
from holdfast.worker.timers import Timers
from holdfast.worker.waiting_queue import TenantCounters, WaitingQueue


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that a sequence shares and need not compute."""

    block_ids: tuple[int, ...] = ()
    """Full blocks of other sequences, or cached ones."""
    num_tokens: int = 0
    """Tokens in `block_ids`; in a fork also those in the parent's next block, which is copied."""
    parent: Sequence | None = None
    """The running sequence to fork from; None: the prefix is from the prefix cache."""
    snapshot: int | None = None
    """The slot with the state behind a prefix from the cache, of a model that keeps states."""
    num_known_tokens: int = 0
    """Tokens whose keys and values are cached, of such a model: a state may be missing behind the last of them."""


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
        turn_ends: frozenset[int] = frozenset(),
        aging_s: float = math.inf,
        tenant_shares: Mapping[str, float] | None = None,
    ) -> None:
        """`slots`: of a model that keeps states. `turn_ends`: tokens that end a turn of a chat."""
        self.allocator = allocator
        self.slots = slots
        self._turn_ends = turn_ends
        self.waiting = WaitingQueue[Sequence](TenantCounters(tenant_shares or {}), aging_s)
        self.running: list[Sequence] = []
        self.num_moves = 0
        """Changes whenever a sequence begins or stops to run."""
        self.num_uncomputed_tokens = 0
        """Of all sequences that have not ended. Code that computes tokens of one counts them here."""
        self.counts = EngineStats()
        """What the scheduler and the engine count, in place."""
        self._copies: dict[int, BlockCopy] = {}  # of the coming step, by destination
        self._in_flight: list[list[Sequence]] = []  # who is in each step whose result is to come, the oldest step first
        self._held: list[Sequence] = []  # ended, with blocks that a step in flight writes to

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence to the waiting."""
        self.waiting.add(sequence)
        self.num_uncomputed_tokens += sequence.num_uncomputed_tokens

    def cached_prefix(self, sequence: Sequence) -> SharedPrefix:
        """The cached full blocks that a waiting sequence can begin with: of a model that keeps states, those up to the
        deepest snapshot.
        """
        size = self.allocator.block_size
        max_num_blocks = sequence.num_skippable_tokens // size
        found = self.allocator.prefix_cache.find(sequence.hash_chain, sequence.token_ids, max_num_blocks)
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
        own = self.allocator.allocate(num_blocks - len(prefix.block_ids))
        sequence.block_ids = (*prefix.block_ids, *own)
        sequence.num_computed_tokens = prefix.num_tokens
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_service_order)
        if prefix.parent is not None and (num_tokens := prefix.num_tokens % self.allocator.block_size):
            self._copy(prefix.parent.block_ids[len(prefix.block_ids)], own[0], num_tokens)
        if self.slots is not None:
            self._give_slot(self.slots, sequence, prefix)
        self._count_prompt(sequence, prefix.parent)

    def take_off(self, sequences: list[Sequence]) -> None:
        """A step is planned that writes to the blocks of these: they are not freed before it has landed."""
        self._in_flight.append(sequences)

    def land(self) -> None:
        """The oldest step in flight has been computed."""
        self._in_flight.pop(0)
        if self._held:
            held, self._held = self._held, []
            for sequence in held:
                self._let_go(sequence)

    def take_block_copies(self) -> tuple[BlockCopy, ...]:
        """The block copies that the next step makes before it computes; each is returned once."""
        if not self._copies:
            return ()
        copies = tuple(self._copies.values())
        self._copies.clear()
        return copies

    @property
    def has_slot(self) -> bool:
        """Whether one more sequence may run, as far as states are concerned."""
        return self.slots is None or self.slots.num_free > 0

    def grow(self, sequence: Sequence, num_blocks: int = 1) -> None:
        """Allocates more blocks for a running sequence."""
        sequence.block_ids += tuple(self.allocator.allocate(num_blocks))

    def shrink(self, sequence: Sequence, num_blocks: int) -> None:
        """Frees the last blocks of a running sequence, which hold no computed token."""
        kept = len(sequence.block_ids) - num_blocks
        self.allocator.free(sequence.block_ids[kept:])
        sequence.block_ids = sequence.block_ids[:kept]

    def store_full_blocks(self, sequence: Sequence, first_position: int) -> None:
        """Adds the blocks that a running sequence has filled, from `first_position` on, to the prefix cache."""
        block_size = self.allocator.block_size
        for index in range(first_position // block_size, sequence.num_computed_tokens // block_size):
            block_id = sequence.block_ids[index]
            self.allocator.prefix_cache.store(block_id, sequence.hash_chain, sequence.token_ids, index)

    def preempt(self, sequence: Sequence) -> None:
        """Preempts a running sequence. It keeps its outputs and loses all that was computed, but for what the
        prefix cache still has of it when it comes back.

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
        self._let_go(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence. If it runs, it keeps its place and its blocks until `release_finished`."""
        sequence.status = SequenceStatus.FINISHED
        self.num_uncomputed_tokens -= sequence.num_uncomputed_tokens

    def forget_prefix(self, sequence: Sequence) -> None:
        """Evicts a running sequence's blocks from the prefix cache, both those it computed and those it found, and the
        snapshots of its states.
        """
        for block_id in sequence.block_ids:
            if block_id in self.allocator.prefix_cache:
                self.allocator.prefix_cache.evict(block_id)
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
                self._let_go(sequence)
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
        owners = Counter(block_id for sequence in (*self.running, *self._held) for block_id in sequence.block_ids)
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

    def _give_slot(self, slots: StateSlots, sequence: Sequence, prefix: SharedPrefix) -> None:
        """Its state is the parent's, the snapshot's, or none yet."""
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
                is_own = self.allocator.ref_count(block_id) == 1 and block_id not in cache
                assert is_own, f"block {block_id} is shared before sequence {sequence.sequence_id} has filled it"
            elif (found := cache.hash_in(block_id)) is not None:
                is_right = found == sequence.hash_chain.hash_of(index, sequence.token_ids, block_size)
                assert is_right, f"block {block_id} is not found by the tokens of sequence {sequence.sequence_id}"

    def _take_out(self, sequence: Sequence) -> None:
        index = bisect_left(self.running, sequence.service_order, key=_service_order)
        assert self.running[index] is sequence, f"sequence {sequence.sequence_id} is not where its order says"
        del self.running[index]
        self.num_moves += 1

    def _copy(self, source: int, destination: int, num_tokens: int) -> None:
        """The source may be a copy that has not been made yet: then it is the original that is copied again."""
        if (earlier := self._copies.get(source)) is not None:
            assert num_tokens <= earlier.num_tokens, f"block {source} will not hold {num_tokens} tokens to copy"
            source = earlier.source
        self._copies[destination] = BlockCopy(source=source, destination=destination, num_tokens=num_tokens)

    def _count_prompt(self, sequence: Sequence, parent: Sequence | None) -> None:
        """Counts what a request finds cached and what it costs when first admitted, not after a preemption.

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
        sequence.tenant.charge(sequence.num_uncomputed_tokens, 0)

    def _let_go(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence that has ended, at once or when the last step in flight that has it lands."""
        if self._in_flight and any(sequence in members for members in self._in_flight):
            self._held.append(sequence)
        else:
            self._free_blocks(sequence)

    def _free_blocks(self, sequence: Sequence) -> None:
        for block_id in sequence.block_ids if self._copies else ():
            self._copies.pop(block_id, None)
        self.allocator.free(sequence.block_ids)
        sequence.block_ids = ()
        if self.slots is not None and sequence.state_slot is not None:
            self.slots.give_back(sequence.state_slot)
            sequence.state_slot = None


def check_can_end(request: EngineRequest, eos_token_ids: frozenset[int]) -> None:
    """Raises `InvalidRequestError` for an output with a grammar, of a model that has no token to end it with."""
    if not eos_token_ids:
        limit = "is not possible: the model has no end-of-sequence token to end the output with"
        raise InvalidRequestError("sampling_params.structured_outputs", request.sampling_params.structure, limit)


def check_fits(sequence: Sequence, *, num_slots: int, max_model_len: int) -> None:
    """Raises `InvalidRequestError` if a sequence is longer than the context, or than the whole KV cache.

    `num_slots` is the number of tokens that the KV cache holds.
    """
    num_prompt_tokens = sequence.num_prompt_tokens
    max_prompt_tokens = min(max_model_len - 1, num_slots)
    if num_prompt_tokens > max_prompt_tokens:
        limit = f"must be at most {max_prompt_tokens} tokens: the context holds {max_model_len} with the output"
        raise InvalidRequestError(
            "prompt", f"{num_prompt_tokens} tokens", f"{limit}, and the KV cache {num_slots} in all"
        )
    if sequence.max_len - 1 > num_slots:  # the last token is sampled and never computed
        limit = f"must be at most {num_slots + 1 - num_prompt_tokens} after a prompt of {num_prompt_tokens} tokens"
        max_tokens = sequence.request.sampling_params.max_tokens
        raise InvalidRequestError(
            "sampling_params.max_tokens", max_tokens, f"{limit}: the KV cache holds {num_slots} in all"
        )


class DeadlineWatch:
    """The deadlines of all requests that have not ended."""

    def __init__(self, queues: SequenceQueues) -> None:
        self._queues = queues
        self._timers = Timers[Sequence]()
        self.tokens_per_s: float | None = None
        """The most tokens that steps compute in a second, as measured by the engine; None: not known.

        Set too low, it drops requests that could have been served; too high, it drops fewer of the hopeless.
        """

    def watch(self, sequence: Sequence) -> None:
        """Watches a sequence with a deadline until it is forgotten."""
        self._timers.set(sequence, self._latest_start_s(sequence))

    def forget(self, sequence: Sequence) -> None:
        self._timers.drop(sequence)

    def next_expired(self, now: float) -> Sequence | None:
        """A sequence whose deadline has passed; it is no longer watched. To be called until None."""
        while (sequence := self._timers.pop(now)) is not None:
            # What was true when the timer was set may not be true any more: it runs now, or its prefix is cached.
            latest_start_s = self._latest_start_s(sequence)
            if latest_start_s <= now:
                return sequence
            self._timers.set(sequence, latest_start_s)
        return None

    def _latest_start_s(self, sequence: Sequence) -> float:
        """The latest time to begin running: a bound for the best case, in which no other request is served."""
        is_new = sequence.status is SequenceStatus.WAITING and sequence.num_output_tokens == 0
        if self.tokens_per_s is None or not is_new:
            return sequence.deadline_s
        num_cached = self._queues.cached_prefix(sequence).num_tokens
        return sequence.deadline_s - (len(sequence.token_ids) - num_cached) / self.tokens_per_s
