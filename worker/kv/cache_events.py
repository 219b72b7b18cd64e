"""What one listener still has to be told of the prefix cache: first all that is there, then what comes and goes.

What may live here: untold changes and how they merge. What may not: the cache itself (`prefix_cache.py`), wires.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.worker.block_hash import short_hash
from holdfast.worker.kv.prefix_cache import BlockStored, CacheEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanges:
    """Short hashes of blocks that can be had from now on, and of those that cannot any more. None is in both."""

    stored: Sequence[int] = ()
    evicted: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.stored or self.evicted)

    def parts(self, max_num: int) -> "Iterator[CacheChanges]":
        """The same in pieces of at most `max_num` hashes; at least one piece."""
        for start in range(0, max(len(self.stored) + len(self.evicted), 1), max_num):
            end = start + max_num
            gone = slice(max(0, start - len(self.stored)), max(0, end - len(self.stored)))
            yield CacheChanges(stored=self.stored[start:end], evicted=self.evicted[gone])


NO_CHANGES: Final = CacheChanges()


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
