"""Kept prefixes: pins, and the positions at which a sequence's state is kept for others, as a snapshot, and where its
prompt is cut for that.

All of these are multiples of the block size, for the keys and values before them are found by blocks:

  - the last one in the prompt, which the same prompt again begins with; or, if that is near, the last one before the
    end of a turn, for templates write something else behind it once the next turn is there, such as no thoughts;
  - the last one in a prefix that its request asks to keep;
  - where a prompt parts from what is cached: keys and values were found up to there and no state. Others part there
    too;
  - every 1,024 tokens;
  - the last one of the output so far: the next turn begins with it, and so does the sequence itself, if it is
    preempted.

The state is that behind the last token of a step, or of any draft in it that was right. So a prompt is computed up to
such a position first, and the rest in the next step. Outputs come by there by themselves.
"""

import collections.abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.worker.block_hash import HashChain
from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.cache.pins import Pin
from holdfast.worker.cache.prefix_cache import BlockStored
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.cache.window_blocks import NOTHING_SEEN, WindowBlocks, WindowPrefix
from holdfast.worker.request import PinnedPrefix
from holdfast.worker.scheduler.sequence import Sequence
from holdfast.worker.step_plan import ScheduledSequence

SPACING: Final = 1024
"""Positions between snapshots of a long prompt or output."""

WORTH_A_CUT: Final = 64
"""Tokens of a prompt from which its last snapshot is worth a step more. Of a shorter one, as much is computed again."""


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
    """Tokens whose blocks are cached: a state, or blocks of layers with a window, may be missing before the last of
    them.
    """
    window: WindowPrefix = NOTHING_SEEN
    """Blocks that the next token sees of it in layers with a window."""


def cuts_of(
    sequence: Sequence, block_size: int, branch: int, *, keeps_snapshots: bool, turn_ends: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """The positions, ascending, up to which a sequence is computed before it goes on, once it is admitted. `branch`:
    the number of its first tokens whose keys and values are cached. `turn_ends`: tokens that end a turn of a chat.
    """
    first, last = sequence.num_computed_tokens, len(sequence.token_ids) - 1
    cuts: set[int] = set()
    if sequence.request.group_id and first < sequence.num_prompt_tokens - 1:
        cuts.add(sequence.num_prompt_tokens - 1)  # where the others of its request fork
    if keeps_snapshots:
        cuts.update(range(first // SPACING * SPACING + SPACING, last, SPACING))
        cuts.add(branch)
        cuts.update(kept.num_tokens // block_size * block_size for kept in sequence.to_pin)
        if last >= WORTH_A_CUT:
            turn = _end_of_last_turn(sequence, turn_ends)
            cuts.add(turn // block_size * block_size)
            if last - turn > WORTH_A_CUT:
                cuts.add(last // block_size * block_size)
    return tuple(sorted(cut for cut in cuts if first < cut < len(sequence.token_ids)))


def _end_of_last_turn(sequence: Sequence, turn_ends: frozenset[int]) -> int:
    """The position behind the last turn that has ended in a prompt, among its last tokens; else its last position."""
    tokens, last = sequence.token_ids, len(sequence.token_ids) - 1
    for position in range(last, max(0, last - SPACING), -1):
        if tokens[position - 1] in turn_ends:
            return position
    return last


def tokens_to_next_cut(sequence: Sequence) -> int:
    """Most tokens of a sequence that a step may compute."""
    computed = sequence.num_computed_tokens
    for cut in sequence.cuts:
        if cut > computed:
            return cut - computed
    return sequence.num_uncomputed_tokens


def keep_state(sequence: Sequence, slots: StateSlots, block_size: int, first: int, num_states: int) -> None:
    """Keeps the state of a running sequence, if a step has brought it to such a position.

    The step began at position `first`, and left the states behind the last `num_states` of the tokens it computed and
    drafted, as far as they were right.
    """
    end = sequence.num_computed_tokens
    position = end // block_size * block_size
    if sequence.state_slot is None or not slots.keeps_snapshots or position <= first or end - position >= num_states:
        return
    in_output = position > sequence.num_admitted_tokens
    is_spaced = position % SPACING == 0
    if not (in_output or is_spaced or position in sequence.cuts):
        return
    num_blocks = position // block_size
    if sequence.num_rolling_blocks:  # the last one of the output takes the place of the one before
        slots.drop(sequence.hash_chain, sequence.token_ids, sequence.num_rolling_blocks)
        sequence.num_rolling_blocks = 0
    is_extended = sequence.is_extended
    is_kept = slots.keep(
        sequence.state_slot, sequence.hash_chain, sequence.token_ids, num_blocks, is_extended=is_extended
    )
    if is_kept and in_output and not is_spaced:
        sequence.num_rolling_blocks = num_blocks


def renew_states(sequence: Sequence, slots: StateSlots, block_size: int) -> None:
    """A sequence ends or is preempted: its blocks count as used now, and so do the snapshots behind them."""
    if slots.keeps_snapshots:
        counts = {position // block_size for position in (*sequence.cuts, sequence.num_cached_tokens)}
        counts.add(sequence.num_rolling_blocks)
        chain, is_extended = sequence.hash_chain, sequence.is_extended
        slots.renew(chain, sequence.token_ids, sorted(counts - {0}), is_extended=is_extended)


def states_left_by(scheduled: ScheduledSequence) -> int:
    """Last tokens of a share that have left the state behind them: the last that is no draft, and the drafts."""
    return 1 + scheduled.num_drafts


OnPinned = Callable[[list[bytes], bytes | None, str, float], None]
"""Called with the hashes of a pinned prefix's blocks, that of the block before its snapshot, tenant and seconds."""

OnUnpinned = Callable[[list[bytes], str, bool], None]
"""Called with the hashes of blocks that are not to be pinned, the last of a prefix first, and their tenant; no hashes:
all of the tenant's. True: the one hash ends a prefix that is not pinned in memory.
"""


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
        self.on_pinned: OnPinned | None = None
        self.on_unpinned: OnUnpinned | None = None

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
                chain, tokens, tenant = sequence.hash_chain, sequence.token_ids, sequence.request.tenant
                seen = self._seen_behind(sequence, num_blocks)
                self._pin(chain, tokens, num_tokens, tenant, self.now, ttl_s, seen)

    def held(self, now: float) -> list[PinnedPrefix]:
        """All pinned prefixes, except prefixes of a longer one that is pinned for as long."""
        cache, pins = self._allocator.prefix_cache, self._allocator.pins.by_block
        contents = {block_id: cache.contents[block_id] for block_id in pins if block_id in cache.contents}
        longest: dict[bytes, float] = {}  # expiry of the pins of a block's continuations
        for block_id, content in contents.items():
            longest[content.parent_hash] = max(pins[block_id].until_s, longest.get(content.parent_hash, 0.0))
        return [
            PinnedPrefix(pins[block_id].tenant, pins[block_id].until_s - now, self._hashes_up_to(content))
            for block_id, content in contents.items()
            if max(now, longest.get(content.block_hash, 0.0)) < pins[block_id].until_s
        ]

    def _hashes_up_to(self, content: BlockStored) -> tuple[bytes, ...]:
        """Hashes of all blocks up to one, that of the root first."""
        cache, hashes = self._allocator.prefix_cache, [content.block_hash]
        while (before := cache.block_of(content.parent_hash)) is not None:
            content = cache.contents[before]
            hashes.append(content.block_hash)
        return (content.parent_hash, *reversed(hashes))

    def keep(self, prefix: PinnedPrefix, now: float) -> None:
        """Pins the cached part of a prefix that another replica had pinned."""
        if prefix.ttl_s > 0:
            num_tokens = (len(prefix.hashes) - 1) * self._allocator.block_size
            chain = HashChain.known(prefix.hashes)
            self._pin(chain, range(num_tokens), num_tokens, prefix.tenant, now, prefix.ttl_s)

    def unpin_all(self, tenant: str) -> int:
        """Ends all pins of a tenant; the number of its blocks."""
        blocks = self._allocator.pins.of(tenant)
        self._allocator.unpin(blocks)
        if self._slots is not None:
            self._slots.unpin_all(tenant)
        self._report_unpinned([], tenant)
        return len(blocks)

    def unpin(self, tenant: str, last_hash: bytes) -> int:
        """Ends the pin of the prefix whose last block has this hash; the number of its blocks. Blocks of another pinned
        prefix stay pinned as long as that is. O(pinned blocks).
        """
        cache, pins = self._allocator.prefix_cache, self._allocator.pins
        block_id = cache.block_of(last_hash)
        pin = None if block_id is None else pins.by_block.get(block_id)
        if pin is None or pin.tenant != tenant:
            self._report_unpinned([last_hash], tenant, is_below=True)
            return 0
        continuations: dict[bytes, list[int]] = {}
        for pinned in pins.by_block.keys() & cache.contents.keys():
            continuations.setdefault(cache.contents[pinned].parent_hash, []).append(pinned)
        hashes: list[bytes] = []
        while block_id in pins.by_block and pins.by_block[block_id].until_s <= pin.until_s:
            content = cache.contents[block_id]
            after = [
                pins.by_block[one].until_s for one in continuations.get(content.block_hash, ()) if one in pins.by_block
            ]
            if after:
                pins.shorten(block_id, max(after))
            else:
                self._allocator.unpin([block_id])
                hashes.append(content.block_hash)
            block_id = cache.block_of(content.parent_hash)
        self._unpin_along(hashes, pin)
        self._report_unpinned(hashes or [last_hash], tenant)
        return len(hashes)

    def _unpin_along(self, hashes: list[bytes], pin: Pin) -> None:
        """Unpins the snapshots and the blocks of windows that were pinned along with these blocks."""
        cache, pins = self._allocator.prefix_cache, self._allocator.pins
        along = [one for one in pins.of(pin.tenant) if one not in cache.contents and pins.by_block[one] == pin]
        self._allocator.unpin(along)  # of layers with a window
        if self._slots is not None:
            self._slots.unpin(hashes, pin.tenant)

    def _report_unpinned(self, hashes: list[bytes], tenant: str, *, is_below: bool = False) -> None:
        if self.on_unpinned is not None:
            self.on_unpinned(hashes, tenant, is_below)

    def _pin(
        self,
        chain: HashChain,
        tokens: collections.abc.Sequence[int],
        num_tokens: int,
        tenant: str,
        now: float,
        ttl_s: float,
        seen: tuple[int, ...] = (),
    ) -> None:
        """`seen`: blocks of layers with a window that are pinned along."""
        until_s, size = now + ttl_s, self._allocator.block_size
        self.next_end_s = min(self.next_end_s, until_s)
        found = self._allocator.prefix_cache.find(chain, tokens, num_tokens // size)
        self._allocator.pin([*found, *seen], tenant, until_s)
        depth, slot = (0, None) if self._slots is None else self._slots.deepest(chain, tokens, len(found))
        if self._slots is not None and slot is not None:
            self._slots.pin(slot, tenant, until_s)
        if self.on_pinned is not None:
            hashes = [chain.hash_of(index, tokens, size) for index in range(len(found))]
            self.on_pinned(hashes, None if slot is None else hashes[depth - 1], tenant, ttl_s)

    def _seen_behind(self, sequence: Sequence, num_blocks: int) -> tuple[int, ...]:
        """Cached blocks of window layers that the token after this many blocks sees."""
        if self._windows is None or sequence.window is None:
            return ()
        longest = num_blocks * self._allocator.block_size
        return self._windows.find(sequence.window.chain, sequence.token_ids, longest)[1].block_ids
