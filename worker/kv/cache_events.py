"""What one listener still has to be told of the prefix cache: first all that is there, then what comes and goes.

What may live here: untold changes and how they merge. What may not: the cache itself (`prefix_cache.py`), wires.
"""

from collections.abc import Iterable

from holdfast.worker.block_hash import short_hash
from holdfast.worker.kv.prefix_cache import BlockStored, CacheEvent
from holdfast.worker.step_update import CacheChanges


class CacheFeed:
    """One listener's untold changes. The latest word on a block replaces an earlier one, so that order is of no matter.

    What is kept is bounded by the blocks that came or went since the last `take`.
    """

    def __init__(self, block_hashes: Iterable[bytes]) -> None:
        """`block_hashes` are all that the cache has now."""
        self._is_stored = dict.fromkeys(map(short_hash, block_hashes), True)

    def note(self, events: Iterable[CacheEvent]) -> None:
        """What happened since, in order."""
        for event in events:
            self._is_stored[short_hash(event.block_hash)] = isinstance(event, BlockStored)

    @property
    def has_news(self) -> bool:
        return bool(self._is_stored)

    def take(self) -> CacheChanges:
        """All that is untold."""
        changes, self._is_stored = self._is_stored, {}
        return CacheChanges(
            stored=[block for block, is_stored in changes.items() if is_stored],
            evicted=[block for block, is_stored in changes.items() if not is_stored],
        )
