"""Prefix cache: the tokens of each cached block, found by hash, and the changes for subscribers.

`CacheFeed` keeps the changes for one listener.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.worker.block_hash import HashChain, short_adapter, short_hash, short_snapshot
from holdfast.worker.step_update import CacheChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A prefix that ends with this block is cached from now on."""

    block_hash: bytes
    parent_hash: bytes
    """Hash of the block before it, or `root_hash` of tenant and salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvicted:
    """This block has left the cache."""

    block_hash: bytes


CacheEvent = BlockStored | BlockEvicted


class PrefixCache:
    """The blocks that can be shared: a table from hash to block and back. Every call costs O(1) per block.

    A hash has one block. Two sequences that compute the same block side by side keep separate copies; later look-ups
    find the first copy. Disabled, nothing is ever stored and nothing hashed.
    """

    def __init__(self, block_size: int, *, enabled: bool) -> None:
        self.enabled = enabled
        self.num_evictions = 0
        self._block_size = block_size
        self._block_ids: dict[bytes, int] = {}
        self.contents: dict[int, BlockStored] = {}
        """Stored blocks by id. To be read only."""
        self._changes: dict[bytes, CacheEvent] | None = None  # since they were last taken; None until then

    def hash_in(self, block_id: int) -> bytes | None:
        """The hash by which the block is found; None if it is not cached."""
        content = self.contents.get(block_id)
        return content.block_hash if content else None

    @property
    def block_hashes(self) -> Iterable[bytes]:
        """The hashes of all cached blocks."""
        return self._block_ids.keys()

    def find(self, chain: HashChain, token_ids: Sequence[int], max_num_blocks: int) -> list[int]:
        """Blocks of the longest cached prefix of `token_ids`, at most `max_num_blocks` full blocks."""
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
        assert block_id not in self.contents, f"block {block_id} is stored and was written to again"
        block_hash = chain.hash_of(index, token_ids, self._block_size)
        if block_hash in self._block_ids:
            return
        content = BlockStored(block_hash=block_hash, parent_hash=chain.hash_of(index - 1, token_ids, self._block_size))
        self._block_ids[block_hash] = block_id
        self.contents[block_id] = content
        self._note(content, BlockEvicted)

    def evict(self, block_id: int) -> None:
        """The block is handed out for other tokens."""
        self.num_evictions += 1
        self.forget(block_id)

    def forget(self, block_id: int) -> None:
        """Removes the block's content from the index."""
        block_hash = self.contents.pop(block_id).block_hash
        del self._block_ids[block_hash]
        self._note(BlockEvicted(block_hash=block_hash), BlockStored)

    def take_events(self) -> list[CacheEvent]:
        """The events since the last call; at the first call, all blocks that are stored.

        A block that was stored and evicted in between is left out, so the number of events is bounded by the number of
        blocks. Nothing is kept before the first call.
        """
        events: list[CacheEvent] = list(self.contents.values() if self._changes is None else self._changes.values())
        self._changes = {}
        return events

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tables and the untold changes agree. O(stored blocks)."""
        mirrored = {content.block_hash: block_id for block_id, content in self.contents.items()}
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


class CacheFeed:
    """The prefix-cache changes that one listener has not been sent yet: first the whole cache, then what changed.

    A block's latest event replaces an earlier one, so events need no order, and their number is bounded by the number
    of blocks that were stored or evicted since the last `take`.
    """

    def __init__(
        self, block_hashes: Iterable[bytes], snapshot_hashes: Iterable[bytes] = (), adapters: Iterable[str] = ()
    ) -> None:
        """`block_hashes` are those of all blocks in the cache now; `snapshot_hashes` those of blocks with a snapshot
        behind them, of a model that keeps states; `adapters` the digests of resident adapters.
        """
        self._is_stored = dict.fromkeys(map(short_hash, block_hashes), True)
        self._is_stored |= {short_snapshot(short_hash(one)): True for one in snapshot_hashes}
        self._is_stored |= {short_adapter(digest): True for digest in adapters}

    def note(self, events: Iterable[CacheEvent], snapshots: Iterable[CacheEvent] = ()) -> None:
        """Take in the events since the last call, in order, and those of snapshots."""
        for event in events:
            self._is_stored[short_hash(event.block_hash)] = isinstance(event, BlockStored)
        for event in snapshots:
            self._is_stored[short_snapshot(short_hash(event.block_hash))] = isinstance(event, BlockStored)

    def note_adapters(self, is_resident: Mapping[str, bool]) -> None:
        """Take in which adapters have become resident since the last call, and which no longer are, by digest."""
        self._is_stored |= {short_adapter(digest): is_there for digest, is_there in is_resident.items()}

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
