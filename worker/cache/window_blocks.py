"""KV blocks of sliding-window layers: a query sees the last positions only, so a sequence frees its older blocks.

Each sequence has one block table for layers with full attention and one for sliding-window layers, whose blocks hold
another number of tokens. Both kinds of blocks take the same memory and come from one pool. The window blocks that
a sequence needs at most at a time are reserved at its admission, so that it never waits for one
(docs/prefix-caching.md#windows).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.worker.block_hash import HashChain
from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.cache.prefix_cache import PrefixCache
from holdfast.worker.model_info import Window

_NO_BLOCK: Final = 0
"""Placeholder in a table for a block that the sequence does not have; it is never read."""


@dataclass(frozen=True, slots=True)
class WindowPrefix:
    """Blocks of a prefix that the next token can see: block number `first` and later ones, all of them full."""

    first: int = 0
    block_ids: tuple[int, ...] = ()


NOTHING_SEEN: Final = WindowPrefix()


class WindowTable:
    """Block table of a running sequence for layers with a window."""

    __slots__ = ("block_ids", "chain", "num_given_back", "promised", "worth_keeping")

    def __init__(self, prefix: WindowPrefix, promised: int, chain: HashChain, worth_keeping: list[range]) -> None:
        self.block_ids: tuple[int, ...] = (_NO_BLOCK,) * prefix.first + prefix.block_ids
        """Block of its first positions, and so on. The first `num_given_back` are not its own, and not read."""
        self.num_given_back = prefix.first
        self.promised = promised
        """Blocks that it may own at any time."""
        self.chain = chain
        """Hashes of its full blocks: their keys in the prefix cache."""
        self.worth_keeping = worth_keeping
        """Numbers of blocks that others are likely to begin with."""

    @property
    def own(self) -> tuple[int, ...]:
        """The blocks that it owns, in order."""
        return self.block_ids[self.num_given_back :]

    @property
    def num_own(self) -> int:
        return len(self.block_ids) - self.num_given_back

    @property
    def num_kept(self) -> int:
        """Blocks that are kept for it: promised ones, and those beyond that it owns for a step."""
        return max(self.promised, self.num_own)


class WindowBlocks:
    """The blocks of all sequences for layers with a window. Every call but `find` costs O(1) per block."""

    def __init__(self, allocator: BlockAllocator, window: Window) -> None:
        self.window = window
        self.cache = PrefixCache(window.block_size, enabled=allocator.prefix_cache.enabled)
        self._allocator = allocator
        allocator.serve_also(self.cache)
        self._num_owned = 0  # blocks with an owner, each counted once
        self._num_kept = 0  # of all sequences; those with blocks in common count them each

    @property
    def num_owed(self) -> int:
        """Free blocks reserved for admitted sequences."""
        return max(0, self._num_kept - self._num_owned)

    def find(self, chain: HashChain, token_ids: Sequence[int], longest: int) -> tuple[int, WindowPrefix]:
        """The longest prefix, of at most this many tokens, whose next token finds all keys and values in its window,
        and these blocks; (0, nothing) if there is none. O(blocks up to `longest`).
        """
        size, spacing = self.window.block_size, self.window.spacing
        end = longest // spacing * spacing
        while end > 0:
            first, block_ids = self.window.first_block(end), []
            for index in range(end // size - 1, first - 1, -1):
                found = self.cache.place_of(chain, token_ids, index)
                if found is None:
                    end = index * size // spacing * spacing  # all ends from there to here see this block
                    break
                block_ids.append(found)
            else:
                return end, WindowPrefix(first, tuple(reversed(block_ids)))
        return 0, NOTHING_SEEN

    def fork(self, table: WindowTable, num_tokens: int) -> WindowPrefix | None:
        """Blocks that the next token after a running sequence's first tokens sees; None: some of them were given
        back.
        """
        first = self.window.first_block(num_tokens)
        if table.num_given_back > first:
            return None
        return WindowPrefix(first, table.block_ids[first : num_tokens // self.window.block_size])

    def begin(self, num_tokens: int, prefix: WindowPrefix, chain: HashChain, ends: Iterable[int]) -> WindowTable:
        """The table of a sequence of at most this many tokens that begins with a prefix. `ends`: of prefixes that
        others are likely to begin with.
        """
        size, window = self.window.block_size, self.window
        worth_keeping = [range(window.first_block(end), end // size) for end in ends]
        table = WindowTable(prefix, window.most_blocks(num_tokens), chain, worth_keeping)
        self._num_owned += sum(self._allocator.ref_count(block_id) == 0 for block_id in prefix.block_ids)
        self._allocator.share(prefix.block_ids)
        self._num_kept += table.num_kept
        return table

    def room(self, table: WindowTable) -> int:
        """Tokens up to which a table can be extended now, so that all other tables can still get their reserved
        blocks.
        """
        promised = max(0, table.promised - table.num_own)
        spare = max(0, self._allocator.num_free - self.num_owed)
        return (len(table.block_ids) + promised + spare) * self.window.block_size

    def extend(self, table: WindowTable, num_tokens: int) -> None:
        """Allocates blocks for this number of tokens; the caller has checked `room`."""
        num_missing = self.window.num_blocks_for(num_tokens) - len(table.block_ids)
        if num_missing > 0:
            self._num_kept -= table.num_kept
            table.block_ids += tuple(self._allocator.allocate(num_missing))
            self._num_owned += num_missing
            self._num_kept += table.num_kept

    def shrink(self, table: WindowTable, num_tokens: int) -> None:
        """Frees blocks after this number of tokens that hold no computed token."""
        num_blocks = self.window.num_blocks_for(num_tokens)
        self._free(table.block_ids[num_blocks:])
        self._num_kept -= table.num_kept
        table.block_ids = table.block_ids[:num_blocks]
        self._num_kept += table.num_kept

    def store(self, table: WindowTable, token_ids: Sequence[int], begin: int, end: int) -> None:
        """The blocks that these computed tokens fill can be found from now on."""
        size = self.window.block_size
        for index in range(begin // size, end // size):
            self.cache.store(table.block_ids[index], table.chain, token_ids, index)

    def give_back(self, table: WindowTable, num_tokens: int) -> None:
        """Returns blocks after `num_tokens` computed tokens: the ones that neither the next token nor a token after the
        last cacheable prefix sees.

        Blocks of no use to other requests are evicted first: otherwise one long prompt would evict the whole cache.
        """
        spacing = self.window.spacing
        end = self.window.first_block(num_tokens // spacing * spacing)
        if end <= table.num_given_back:
            return
        self._num_kept -= table.num_kept
        begin, table.num_given_back = table.num_given_back, end
        self._num_kept += table.num_kept
        kept = [index for index in range(begin, end) if any(index in each for each in table.worth_keeping)]
        rest = sorted(set(range(begin, end)).difference(kept))
        self._free([table.block_ids[index] for index in kept])
        self._free([table.block_ids[index] for index in rest], evict_first=True)

    def end(self, table: WindowTable) -> None:
        """The sequence has ended, or is preempted."""
        self._num_kept -= table.num_kept
        self._free(table.own)
        table.block_ids, table.num_given_back, table.promised = (), 0, 0

    def forget(self, chain: HashChain, token_ids: Sequence[int], num_tokens: int) -> None:
        """Takes the blocks of these tokens out of the prefix cache, also blocks with owners."""
        for index in range(num_tokens // self.window.block_size):
            block_id = self.cache.place_of(chain, token_ids, index)
            if block_id is not None:
                self._allocator.forget(block_id)

    def check_integrity(self, tables: Sequence[WindowTable]) -> None:
        """Raises AssertionError unless these are the tables of all sequences, and promises can be kept. O(blocks)."""
        owned = {block_id for table in tables for block_id in table.own}
        assert len(owned) == self._num_owned, f"{len(owned)} blocks of windows have owners, not {self._num_owned}"
        kept = sum(table.num_kept for table in tables)
        assert kept == self._num_kept, f"{kept} blocks are kept for sequences, not {self._num_kept}"
        free = self._allocator.num_free
        assert free >= self.num_owed, f"{free} blocks are free, and {self.num_owed} are promised"

    def _free(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        self._allocator.free(block_ids, evict_first=evict_first)
        self._num_owned -= sum(self._allocator.ref_count(block_id) == 0 for block_id in block_ids)
