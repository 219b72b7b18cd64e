"""Cache feed: the prefix-cache changes that one listener has not been sent yet."""

from collections.abc import Iterable

from holdfast.worker.block_hash import short_hash, short_snapshot
from holdfast.worker.cache.block_pool import BlockStored, CacheEvent
from holdfast.worker.step_update import CacheChanges


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
