"""Prefix index: the block hashes in each replica's prefix cache, for prefix-aware routing.

What may live here: the sets of hashes that replicas report, and the hashes of a prompt to look up. What may not: the
choice (`policy.py`), wire formats. An index may lag or, by a hash collision, be wrong: then a request goes to a replica
with less of its prefix, and its output is the same.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from holdfast.worker.block_hash import short_hashes
from holdfast.worker.request import EngineRequest


class PromptPrefix:
    """The hashes of a prompt's full blocks, computed lazily and once.

    About 1.3 us for each block of 16 tokens: a prompt of 32,768 tokens that is cached somewhere in full takes 2.7 ms,
    one whose first block is nowhere takes one hash.
    """

    __slots__ = ("_hashes", "_request")

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._hashes: dict[int, tuple[list[int], Iterator[int]]] = {}
        """By block size, since replicas of one model may differ in it: hashes worked out, and those to come."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._request.prompt_token_ids)

    def blocks(self, block_size: int) -> Iterator[int]:
        """The short hashes of the full blocks that a replica could take from its cache, in order: the prompt's last
        token is computed in any case.
        """
        if block_size not in self._hashes:
            salt, token_ids = self._request.cache_salt, self._request.prompt_token_ids
            num_blocks = (len(token_ids) - 1) // block_size
            self._hashes[block_size] = [], short_hashes(salt, token_ids, block_size, num_blocks)
        known, unknown = self._hashes[block_size]
        yield from known
        for block in unknown:
            known.append(block)
            yield block


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of one prompt each replica has cached."""

    holders: tuple[tuple[int, int], ...] = ()
    """Numbers of leading tokens, the largest first, each with the replicas that have so many: slots, as an integer's
    bits. A replica with more of the prompt is among those with fewer too."""

    def num_cached(self, slot: int) -> int:
        """Leading tokens that the replica of a slot has cached."""
        return next((num_tokens for num_tokens, mask in self.holders if mask >> slot & 1), 0)


NO_MATCH: Final = PrefixMatch()


class PrefixHolders:
    """The replicas of a model that have each block cached. Lookups cost the same however many replicas there are."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        """By short hash, the slots of the holders, as an integer's bits. None is 0."""
        self._num_by_size = Counter[int]()
        """Replicas by block size: those of a model may differ in it, and then share no hash."""

    def match(self, prefix: PromptPrefix) -> PrefixMatch:
        """Looks up a prompt's blocks one by one, up to the first that nobody has."""
        if not self._masks:
            return NO_MATCH
        holders = [run for block_size in self._num_by_size for run in self._runs(prefix, block_size)]
        return PrefixMatch(tuple(sorted(holders, reverse=True))) if holders else NO_MATCH

    def _runs(self, prefix: PromptPrefix, block_size: int) -> Iterator[tuple[int, int]]:
        """For each set of holders, the most tokens that all of it have."""
        last_with: dict[int, int] = {}
        mask = -1
        num_tokens = 0
        for block in prefix.blocks(block_size):
            mask &= self._masks.get(block, 0)
            if not mask:
                break
            num_tokens += block_size
            last_with[mask] = num_tokens
        return ((num_tokens, mask) for mask, num_tokens in last_with.items())

    def add_replica(self, block_size: int) -> None:
        self._num_by_size[block_size] += 1

    def remove_replica(self, block_size: int) -> None:
        self._num_by_size[block_size] -= 1
        if not self._num_by_size[block_size]:
            del self._num_by_size[block_size]

    def add(self, block: int, bit: int) -> None:
        self._masks[block] = self._masks.get(block, 0) | bit

    def discard(self, block: int, bit: int) -> None:
        mask = self._masks.get(block, 0) & ~bit
        if mask:
            self._masks[block] = mask
        else:
            self._masks.pop(block, None)


class PrefixIndex:
    """The hashes of the blocks that one replica has cached, kept in its model's `PrefixHolders` as well."""

    __slots__ = ("_bit", "_block_size", "_blocks", "_holders")

    def __init__(self, block_size: int, holders: PrefixHolders, slot: int) -> None:
        self._block_size = block_size
        self._blocks: set[int] = set()
        self._holders = holders
        self._bit = 1 << slot
        holders.add_replica(block_size)

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, stored: Collection[int], evicted: Collection[int]) -> None:
        """Takes one batch of cache events. No block is in both lists."""
        self._blocks.update(stored)
        self._blocks.difference_update(evicted)
        for block in stored:
            self._holders.add(block, self._bit)
        for block in evicted:
            self._holders.discard(block, self._bit)

    def close(self) -> None:
        """The replica was lost, and its cache with it."""
        for block in self._blocks:
            self._holders.discard(block, self._bit)
        self._blocks.clear()
        self._holders.remove_replica(self._block_size)

    def num_cached_tokens(self, prefix: PromptPrefix) -> int:
        """Leading tokens of a prompt that are cached here. Looks up one block more than are cached."""
        if not self._blocks:
            return 0
        is_cached = (block in self._blocks for block in prefix.blocks(self._block_size))
        return self._block_size * sum(takewhile(bool, is_cached))
