"""Block pool of the paged KV cache: which sequences own each block, and which blocks still hold a cached prefix.

Ids and reference counts, in plain integers. A free block may still hold a prefix: it counts as free, and the allocator
evicts it when no blank one is left. `CacheFeed` keeps the changes of the prefix cache for one listener.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.worker.block_hash import next_hash, root_hash, short_hash, short_snapshot
from holdfast.worker.cache.pins import Pins
from holdfast.worker.step_update import CacheChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A prefix that ends with this block is cached from now on."""

    block_hash: bytes
    parent_hash: bytes
    """Hash of the block before it, or `root_hash` of tenant and salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvicted:
    """This block is not cached any more."""

    block_hash: bytes


CacheEvent = BlockStored | BlockEvicted


class HashChain:
    """The hashes of one sequence's full blocks. Each is worked out once, when it is first asked for."""

    __slots__ = ("_hashes",)

    def __init__(self, salt: str, tenant: str = "", adapter: str = "") -> None:
        self._hashes = [root_hash(salt, tenant, adapter)]

    def hash_of(self, index: int, token_ids: Sequence[int], block_size: int) -> bytes:
        """Hash of block number `index`, -1 for the root. `token_ids` are all of the sequence's, and fill that block."""
        while len(self._hashes) < index + 2:
            start = (len(self._hashes) - 1) * block_size
            self._hashes.append(next_hash(self._hashes[-1], token_ids[start : start + block_size]))
        return self._hashes[index + 1]


class PrefixCache:
    """The blocks that can be shared: a table from hash to block and back. Every call costs O(1) per block.

    A hash has one block. Two sequences that compute the same block side by side keep their own copies; the first copy
    is the one that others find. Disabled, nothing is ever stored and nothing hashed.
    """

    def __init__(self, block_size: int, *, enabled: bool) -> None:
        self.enabled = enabled
        self.num_evictions = 0
        self._block_size = block_size
        self._block_ids: dict[bytes, int] = {}
        self._contents: dict[int, BlockStored] = {}
        self._changes: dict[bytes, CacheEvent] | None = None  # since they were last taken; None until then

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._contents

    def hash_in(self, block_id: int) -> bytes | None:
        """The hash by which the block is found; None if it is not cached."""
        content = self._contents.get(block_id)
        return content.block_hash if content else None

    @property
    def block_hashes(self) -> Iterable[bytes]:
        """The hashes of all cached blocks."""
        return self._block_ids.keys()

    def find(self, chain: HashChain, token_ids: Sequence[int], max_num_blocks: int) -> list[int]:
        """The blocks of the longest prefix of `token_ids` that is stored, up to so many full blocks."""
        block_ids: list[int] = []
        for index in range(max_num_blocks if self.enabled else 0):
            block_id = self._block_ids.get(chain.hash_of(index, token_ids, self._block_size))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def block_of(self, block_hash: bytes) -> int | None:
        """The block that is found by this hash."""
        return self._block_ids.get(block_hash)

    def place_of(self, chain: HashChain, token_ids: Sequence[int], index: int) -> int | None:
        """Place that holds block number `index` of a sequence; None if none does."""
        return self._block_ids.get(chain.hash_of(index, token_ids, self._block_size)) if self._block_ids else None

    def store(self, block_id: int, chain: HashChain, token_ids: Sequence[int], index: int) -> None:
        """Block number `index` of a sequence is computed and in `block_id`, which is not written to again."""
        if not self.enabled:
            return
        assert block_id not in self._contents, f"block {block_id} is stored and was written to again"
        block_hash = chain.hash_of(index, token_ids, self._block_size)
        if block_hash in self._block_ids:
            return
        content = BlockStored(block_hash=block_hash, parent_hash=chain.hash_of(index - 1, token_ids, self._block_size))
        self._block_ids[block_hash] = block_id
        self._contents[block_id] = content
        self._note(content, BlockEvicted)

    def evict(self, block_id: int) -> None:
        """The block is handed out for other tokens."""
        self.num_evictions += 1
        self.forget(block_id)

    def forget(self, block_id: int) -> None:
        """Removes the block's content from the index."""
        block_hash = self._contents.pop(block_id).block_hash
        del self._block_ids[block_hash]
        self._note(BlockEvicted(block_hash=block_hash), BlockStored)

    def take_events(self) -> list[CacheEvent]:
        """The events since the last call; at the first call, all blocks that are stored.

        A block that was stored and evicted in between is left out, so what is kept is bounded by the number of blocks.
        Nothing is kept before the first call.
        """
        events: list[CacheEvent] = list(self._contents.values() if self._changes is None else self._changes.values())
        self._changes = {}
        return events

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tables and the untold changes agree. O(stored blocks)."""
        mirrored = {content.block_hash: block_id for block_id, content in self._contents.items()}
        assert mirrored == self._block_ids, "the tables of hashes and of blocks differ"
        for block_hash, event in (self._changes or {}).items():
            is_stored = block_hash in self._block_ids
            assert isinstance(event, BlockStored) == is_stored, f"{event} is pending, and the block is in another state"

    def _note(self, event: CacheEvent, opposite: type[CacheEvent]) -> None:
        """Record a change for the next report. A change and its opposite in one report cancel out."""
        if self._changes is None:
            return
        if isinstance(self._changes.get(event.block_hash), opposite):
            del self._changes[event.block_hash]
        else:
            self._changes[event.block_hash] = event


LASTING_SHARE: Final = 0.75
"""Share of the blocks up to which those of extended prefixes outlive all others."""


class BlockAllocator:
    """Blocks 0 to `num_blocks - 1`, each blank, cached without an owner, or owned by as many as its count says.

    Blank blocks are handed out first, then cached ones, the one first that has been without an owner for longest; after
    all others those of sequences that went on from a cached prefix, and last those that are pinned. Every call but
    those of pins costs O(1) per block, and the ids handed out depend on the calls alone. A call that breaks the rules
    (more blocks than are free, an id that is not allocated) is our own
    mistake and an AssertionError at once.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = False, max_num_pins: int = 0
    ) -> None:
        """`max_num_pins`: blocks that a tenant may have pinned."""
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
        # Cached blocks without an owner, the next to be evicted first. Not a dict, which looks past all that it has
        # lost to find its first.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._lasting: OrderedDict[int, None] = OrderedDict()  # likewise, those whose prefix was extended before
        self._kept: OrderedDict[int, None] = OrderedDict()  # likewise, those that are pinned
        self._extended: set[int] = set()  # cached blocks of extended prefixes, with or without an owner
        self._most_lasting = int(LASTING_SHARE * num_blocks)
        self.pins = Pins(max_num_pins)
        """To be read only."""

    @property
    def num_free(self) -> int:
        """Blocks without an owner, those that still hold a prefix among them."""
        return len(self._blank) + len(self._evictable) + len(self._lasting) + len(self._kept)  # asked in every turn

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold a prefix."""
        return len(self._evictable) + len(self._lasting) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def serve_also(self, cache: PrefixCache) -> None:
        """Blocks may hold prefixes for this cache as well. A block holds one, of one cache."""
        self._caches.append(cache)

    def is_cached(self, block_id: int) -> bool:
        """Whether a block holds a prefix."""
        return any(block_id in cache for cache in self._caches)

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
            block_id, _ = (self._evictable or self._lasting or self._kept).popitem(last=False)
            self.pins.drop(block_id)
            self._extended.discard(block_id)
            self._cache_of(block_id).evict(block_id)
            block_ids.append(block_id)
        block_ids.reverse()
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

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
        prefix is of use without its end and not without its beginning. `evict_first`: before all that are cached now.
        `is_extended`: the sequence went on from a cached prefix, and others are likely to go on from it. Then its
        blocks outlive those of sequences that did not, as long as they are at most `LASTING_SHARE` of all.
        """
        for block_id in reversed(block_ids):
            assert self.ref_count(block_id) > 0, f"block {block_id} is freed but not allocated"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self.pins.by_block:
                self._kept[block_id] = None
            elif self.is_cached(block_id):
                if is_extended:
                    self._extended.add(block_id)
                self._line_of(block_id)[block_id] = None
                if evict_first:
                    self._line_of(block_id).move_to_end(block_id, last=False)
            else:
                self._blank.append(block_id)
        while len(self._lasting) > self._most_lasting:  # the oldest of them is as others are from now on
            block_id, _ = self._lasting.popitem(last=False)
            self._extended.discard(block_id)
            self._evictable[block_id] = None

    def make_blank(self, block_id: int) -> None:
        """Drops the content of a cached block without an owner."""
        line = self._line_of(block_id)
        assert block_id in line, f"block {block_id} is not cached, or has an owner"
        del line[block_id]
        self.pins.drop(block_id)
        self._extended.discard(block_id)
        self._cache_of(block_id).forget(block_id)
        self._blank.append(block_id)

    def forget(self, block_id: int) -> None:
        """Takes a cached block out of the prefix cache, also one that has owners."""
        if self.ref_count(block_id):
            self.pins.drop(block_id)
            self._extended.discard(block_id)
            self._cache_of(block_id).evict(block_id)
        else:
            self.make_blank(block_id)

    def pin(self, block_ids: Sequence[int], tenant: str, until_s: float) -> None:
        """Until then, evicts these cached blocks, given from a prefix's beginning, after all that are not pinned."""
        gave_way = self.pins.put(block_ids, tenant, until_s)
        for block_id in reversed(block_ids):
            if block_id in self.pins.by_block:
                for line in (self._evictable, self._lasting):
                    if block_id in line:
                        del line[block_id]
                        self._kept[block_id] = None
        self._release(gave_way)

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
        assert self._lasting.keys() <= self._extended, "a block lasts whose prefix nobody went on from"

    def _release(self, block_ids: Sequence[int]) -> None:
        """Moves blocks without a pin any more to the end of the others, in this order, as if used last."""
        for block_id in block_ids:
            if block_id in self._kept:
                del self._kept[block_id]
                self._line_of(block_id)[block_id] = None

    def _line_of(self, block_id: int) -> OrderedDict[int, None]:
        """Line of eviction in which a cached block without an owner stands."""
        if block_id in self.pins.by_block:
            return self._kept
        return self._lasting if block_id in self._extended else self._evictable

    def _cache_of(self, block_id: int) -> PrefixCache:
        """The cache that finds a block."""
        return next(cache for cache in self._caches if block_id in cache)


class CacheFeed:
    """The prefix-cache changes that one listener has not been sent yet: first the whole cache, then what changed.

    A block's latest event replaces an earlier one, so events need no order, and what is kept is bounded by the number
    of blocks that were stored or evicted since the last `take`.
    """

    def __init__(self, block_hashes: Iterable[bytes], snapshot_hashes: Iterable[bytes] = ()) -> None:
        """`block_hashes` are those of all blocks in the cache now; `snapshot_hashes` those of blocks with a snapshot
        behind them, of a model that keeps states.
        """
        self._is_stored = dict.fromkeys(map(short_hash, block_hashes), True)
        self._is_stored |= {short_snapshot(short_hash(one)): True for one in snapshot_hashes}

    def note(self, events: Iterable[CacheEvent], snapshots: Iterable[CacheEvent] = ()) -> None:
        """Take in the events since the last call, in order, and those of snapshots."""
        for event in events:
            self._is_stored[short_hash(event.block_hash)] = isinstance(event, BlockStored)
        for event in snapshots:
            self._is_stored[short_snapshot(short_hash(event.block_hash))] = isinstance(event, BlockStored)

    @property
    def has_news(self) -> bool:
        return bool(self._is_stored)

    def take(self) -> CacheChanges:
        """The changes since the last call."""
        changes, self._is_stored = self._is_stored, {}
        return CacheChanges(
            stored=[block for block, is_stored in changes.items() if is_stored],
            evicted=[block for block, is_stored in changes.items() if not is_stored],
        )
