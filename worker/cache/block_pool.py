"""Block pool of the paged KV cache: which sequences own each block, and which blocks still hold a cached prefix.

Ids and reference counts, in plain integers. A free block may still hold a prefix: it counts as free, and the allocator
evicts it when no blank one is left.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, Protocol

from holdfast.worker.cache.pins import Pins
from holdfast.worker.cache.prefix_cache import PrefixCache

LASTING_SHARE: Final = 0.75
"""Share of the blocks up to which those of extended prefixes outlive all others."""


Age = tuple[int, int]
"""Eviction order of cached content, the least first: number of its queue, and position in it."""


class BlockBorrower(Protocol):
    """Owner of blocks for another use than keys and values, which gives them back before older cached blocks are
    evicted.
    """

    @property
    def num_idle(self) -> int:
        """Blocks that the borrower can give back for other uses."""
        ...

    @property
    def num_lasting(self) -> int:
        """Idle blocks that the borrower gives back last."""
        ...

    def make_way(self, age: Age | None) -> bool:
        """Gives back the blocks of its oldest thing, if that is older than this. False: there is none."""
        ...

    def note_evicted(self, block_hash: bytes) -> None:
        """The block of this hash was evicted."""
        ...


class BlockAllocator:
    """Blocks 0 to `num_blocks - 1`: each is blank, cached without an owner, or owned, with a reference count.

    Blank blocks are handed out first, then cached ones, the least recently used first; after them blocks of sequences
    that continued a cached prefix, and last pinned blocks. Every call but those of pins costs O(1) per block, and the
    ids handed out depend on the calls alone. A call that breaks the rules (more blocks than are free, an id that is not
    allocated) is our own mistake and an AssertionError at once.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = False,
        max_num_pins: int = 0,
        clock: Iterator[int] | None = None,
    ) -> None:
        """`max_num_pins`: blocks that a tenant may have pinned. `clock`: that of another, to compare ages with."""
        assert num_blocks > 0, f"{num_blocks = } must be positive"
        assert block_size > 0, f"{block_size = } must be positive"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = PrefixCache(block_size, enabled=prefix_caching)
        self._caches = [self.prefix_cache]
        self._ref_counts = [0] * num_blocks
        # A stack with the lowest id on top. Blocks freed together come out together and in the same order, so that
        # sequences hold runs of neighbours, which are gathered faster, and the blocks used last are still cached.
        self._blank = list(reversed(range(num_blocks)))
        # Cached blocks without an owner, the next to be evicted first, and since when. Not a dict, which skips all its
        # deleted entries to find its first.
        self._evictable: OrderedDict[int, int] = OrderedDict()
        self._lasting: OrderedDict[int, int] = OrderedDict()  # likewise, for blocks whose prefix was continued before
        self._kept: OrderedDict[int, int] = OrderedDict()  # likewise, for pinned blocks
        self._extended: set[int] = set()  # cached blocks of extended prefixes, with or without an owner
        self._most_lasting = int(LASTING_SHARE * num_blocks)
        self.pins = Pins(max_num_pins)
        """To be read only."""
        self.clock = count() if clock is None else clock
        self.borrower: BlockBorrower | None = None

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: those without an owner, with or without a cached prefix, and those of a
        borrower that gives them back.
        """
        own = len(self._blank) + len(self._evictable) + len(self._lasting) + len(self._kept)  # asked in every turn
        return own if self.borrower is None else own + self.borrower.num_idle

    @property
    def oldest(self) -> Age | None:
        """Age of the next cached block to be evicted; None if no block is."""
        lines = enumerate((self._evictable, self._lasting, self._kept))
        return next(((number, next(iter(line.values()))) for number, line in lines if line), None)

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold a prefix."""
        return len(self._evictable) + len(self._lasting) + len(self._kept)

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    @property
    def num_lasting(self) -> int:
        """Cached blocks of extended prefixes without an owner."""
        return len(self._lasting)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def serve_also(self, cache: PrefixCache) -> None:
        """Blocks may hold prefixes for this cache as well. A block holds one, of one cache."""
        self._caches.append(cache)

    def is_cached(self, block_id: int) -> bool:
        """Whether a block holds a prefix."""
        for cache in self._caches:  # noqa: SIM110  # asked for each block that is freed, so no generator
            if block_id in cache.contents:
                return True
        return False

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
        num_left = max(0, len(self._blank) - num_blocks)
        block_ids = self._blank[num_left:]
        del self._blank[num_left:]
        while len(block_ids) < num_blocks:
            if not self._blank:
                self.evict_next()
            block_ids.append(self._blank.pop())
        block_ids.reverse()
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def evict_next(self) -> int | None:
        """Evicts the least recently used cached block and returns it; None: the borrower has freed blocks of older use
        instead.
        """
        if self.borrower is not None and self.borrower.make_way(self.oldest):
            return None
        block_id, _ = (self._evictable or self._lasting or self._kept).popitem(last=False)
        self.pins.drop(block_id)
        self._extended.discard(block_id)
        self._evict(block_id)
        self._blank.append(block_id)
        return block_id

    def lend(self, num_blocks: int) -> list[int]:
        """Like `allocate`, for the borrower: blank blocks that others would get last."""
        while len(self._blank) < num_blocks:
            self.evict_next()
        block_ids, self._blank = self._blank[:num_blocks], self._blank[num_blocks:]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def take_back(self, block_ids: Sequence[int]) -> None:
        """Returned loans are blank again, and are handed out after all blocks that are blank now."""
        for block_id in block_ids:
            self._ref_counts[block_id] = 0
        self._blank[:0] = block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one owner to each of these blocks, which are allocated or cached."""
        for block_id in block_ids:
            if self.ref_count(block_id) == 0:
                line = self._line_of(block_id)
                assert block_id in line, f"block {block_id} is shared but not allocated and not cached"
                del line[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int], *, evict_first: bool = False, is_extended: bool = False) -> None:
        """Take one owner from each of these blocks; a block without owners is free again.

        The blocks of a sequence are passed in its order: of those freed together the last is evicted first, because a
        prefix is of use without its end and not without its beginning. `evict_first`: before all other cached blocks.
        `is_extended`: the sequence went on from a cached prefix, and others are likely to go on from it. Then its
        blocks outlive those of sequences that did not, as long as they are at most `LASTING_SHARE` of all.
        """
        for block_id in reversed(block_ids):
            assert self.ref_count(block_id) > 0, f"block {block_id} is freed but not allocated"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self.pins.by_block:
                self._kept[block_id] = next(self.clock)
            elif self.is_cached(block_id):
                if is_extended:
                    self._extended.add(block_id)
                self._line_of(block_id)[block_id] = -1 if evict_first else next(self.clock)
                if evict_first:
                    self._line_of(block_id).move_to_end(block_id, last=False)
            else:
                self._blank.append(block_id)
        most = self._most_lasting - (0 if self.borrower is None else self.borrower.num_lasting)
        while len(self._lasting) > max(0, most):  # the oldest of them is as others are from now on
            block_id, _ = self._lasting.popitem(last=False)
            self._extended.discard(block_id)
            self._evictable[block_id] = next(self.clock)

    def make_blank(self, block_id: int) -> None:
        """Drops the content of a cached block without an owner."""
        line = self._line_of(block_id)
        assert block_id in line, f"block {block_id} is not cached, or has an owner"
        del line[block_id]
        self.pins.drop(block_id)
        self._extended.discard(block_id)
        self._note_lost(block_id)
        self._cache_of(block_id).forget(block_id)
        self._blank.append(block_id)

    def forget(self, block_id: int) -> None:
        """Takes a cached block out of the prefix cache, also one that has owners."""
        if self.ref_count(block_id):
            self.pins.drop(block_id)
            self._extended.discard(block_id)
            self._evict(block_id)
        else:
            self.make_blank(block_id)

    def pin(self, block_ids: Sequence[int], tenant: str, until_s: float) -> None:
        """Until then, evicts these cached blocks, in the order of their prefix, after all unpinned ones."""
        gave_way = self.pins.put(block_ids, tenant, until_s)
        for block_id in reversed(block_ids):
            if block_id in self.pins.by_block:
                for line in (self._evictable, self._lasting):
                    if block_id in line:
                        del line[block_id]
                        self._kept[block_id] = next(self.clock)
        self._release(gave_way)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Ends the pins of these blocks, given in the order in which to evict them."""
        for block_id in block_ids:
            self.pins.drop(block_id)
        self._release(block_ids)

    def end_pins(self, now: float) -> None:
        """Ends the pins whose time is up."""
        self._release(self.pins.end(now))

    def forget_cached(self) -> None:
        """Evicts all blocks from the prefix cache. None may have an owner."""
        assert not self.num_used, f"{self.num_used} blocks have owners"
        self._extended.clear()
        for line in (self._evictable, self._lasting, self._kept):
            for block_id in line:
                self.pins.drop(block_id)
                self._cache_of(block_id).evict(block_id)
            self._blank += line
            line.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is blank, once, or cached without an owner, or owned. O(blocks)."""
        for cache in self._caches:
            cache.check_integrity()
        blank = set(self._blank)
        assert len(blank) == len(self._blank), "a block is twice in the list of blank ones"
        cached = self._evictable.keys() | self._lasting.keys() | self._kept.keys()
        foreign = (blank | cached) - set(range(self.num_blocks))
        assert not foreign, f"foreign ids among the free: {foreign}"
        for block_id, ref_count in enumerate(self._ref_counts):
            assert ref_count >= 0, f"block {block_id} has {ref_count} owners"
            is_cached = self.is_cached(block_id)
            expected = (ref_count == 0 and not is_cached, ref_count == 0 and is_cached)
            found = (block_id in blank, block_id in cached)
            assert found == expected, (
                f"block {block_id} has {ref_count} owners and is {'' if is_cached else 'not '}cached, and is "
                f"{'' if found[0] else 'not '}blank and {'' if found[1] else 'not '}evictable"
            )
        self.pins.check_integrity(filter(self.is_cached, range(self.num_blocks)))
        misplaced = {block_id for block_id in cached if (block_id in self.pins.by_block) != (block_id in self._kept)}
        assert not misplaced, f"blocks {misplaced} are pinned and may be evicted early, or are kept without a pin"
        num_standing = len(self._evictable) + len(self._lasting) + len(self._kept)
        assert num_standing == len(cached), "a block stands in two lines"
        assert self._lasting.keys() <= self._extended, "lifetime of a block whose prefix no sequence continued"

    def _release(self, block_ids: Sequence[int]) -> None:
        """Moves blocks without a pin to the end of the others, in this order, as if used last."""
        for block_id in block_ids:
            if block_id in self._kept:
                del self._kept[block_id]
                self._line_of(block_id)[block_id] = next(self.clock)

    def _evict(self, block_id: int) -> None:
        self._note_lost(block_id)
        self._cache_of(block_id).evict(block_id)

    def _note_lost(self, block_id: int) -> None:
        if self.borrower is not None and (block_hash := self._cache_of(block_id).hash_in(block_id)) is not None:
            self.borrower.note_evicted(block_hash)

    def _line_of(self, block_id: int) -> OrderedDict[int, int]:
        """Line of eviction in which a cached block without an owner stands."""
        if block_id in self.pins.by_block:
            return self._kept
        return self._lasting if block_id in self._extended else self._evictable

    def _cache_of(self, block_id: int) -> PrefixCache:
        """The cache that finds a block."""
        return next(cache for cache in self._caches if block_id in cache.contents)
