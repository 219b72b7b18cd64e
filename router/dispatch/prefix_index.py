"""Prefix index: the block hashes in each replica's prefix cache, and its resident adapters, for prefix-aware routing.
An index may lag or, by a hash collision, be wrong: then a request goes to a replica with less of its prefix, and its
output is the same.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from itertools import takewhile, tee
from typing import Final, NamedTuple

from holdfast.worker.block_hash import root_hash, short_adapter, short_hashes, short_snapshot
from holdfast.worker.request import EngineRequest


class PromptPrefix:
    """The hashes of a prompt's full blocks, computed lazily and once.

    About 1.1 us for each block of 16 tokens: a prompt of 32,768 tokens that is cached somewhere in full takes 2.3 ms,
    one whose first block is nowhere takes one hash.
    """

    __slots__ = ("_hashes", "_request")

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._hashes: dict[int, Iterator[int]] = {}
        """Hashes by block size, since replicas of one model may differ in it. Copies of a `tee` share the computed
        values.
        """

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._request.prompt_token_ids)

    @property
    def adapter_digest(self) -> str:
        """Empty without an adapter."""
        return self._request.adapter_digest

    def blocks(self, block_size: int) -> Iterator[int]:
        """The short hashes of the full blocks that a replica could take from its cache, in order: the prompt's last
        token is computed in any case.
        """
        hashes = self._hashes.get(block_size)
        if hashes is None:
            request, token_ids = self._request, self._request.prompt_token_ids
            root = root_hash(request.cache_salt, request.tenant, request.adapter_digest)
            num_blocks = (len(token_ids) - 1) // block_size
            (hashes,) = tee(short_hashes(root, token_ids, block_size, num_blocks), 1)
            self._hashes[block_size] = hashes
        return copy(hashes)


EVERY: Final = -1
"""All slots, as an integer's bits."""


class PrefixMatch(NamedTuple):
    """Cached part of one prompt in each replica, and where its adapter is."""

    holders: tuple[tuple[int, int], ...] = ()
    """Numbers of leading tokens, the largest first, each with the replicas that have this many: slots, as an integer's
    bits. A replica with more of the prompt is among those with fewer too.
    """
    residents: int = EVERY
    """The replicas in which the request's adapter is resident or being loaded: slots, as an integer's bits. Every one,
    if the request has none.
    """

    def num_cached(self, slot: int) -> int:
        """Leading tokens that the replica of a slot has cached."""
        for num_tokens, mask in self.holders:
            if mask >> slot & 1:
                return num_tokens
        return 0

    def among(self, slots: int) -> "PrefixMatch":
        """The same of these replicas alone: slots, as an integer's bits."""
        holders = tuple([(count, mask & slots) for count, mask in self.holders if mask & slots])
        return PrefixMatch(holders, self.residents if self.residents == EVERY else self.residents & slots)


NO_MATCH: Final = PrefixMatch()


class _Kind(NamedTuple):
    """Kind of a replica's blocks."""

    block_size: int
    has_states: bool


class PrefixHolders:
    """The replicas of a model that have each block cached. Lookups cost the same however many replicas there are."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        """Slots of the holders as bits of an integer, by short hash. No holder is 0. Blocks that were stored together
        share one integer, which saves memory and comparisons."""
        self._num_by_kind = Counter[_Kind]()
        """Replicas by their blocks: those of a model may differ in them, and then share no hash."""

    def match(self, prefix: PromptPrefix) -> PrefixMatch:
        """Looks up a prompt's adapter, and its blocks one by one, up to the first that no replica has."""
        digest = prefix.adapter_digest
        if not self._masks:
            return PrefixMatch(residents=0) if digest else NO_MATCH
        residents = self._masks.get(short_adapter(digest), 0) if digest else EVERY
        runs: list[tuple[int, int]] = []
        for kind in self._num_by_kind:
            find = self._snapshots if kind.has_states else self._runs
            runs += find(prefix, kind.block_size)
        return PrefixMatch(tuple(sorted(runs, reverse=True)), residents) if runs or digest else NO_MATCH

    def _runs(self, prefix: PromptPrefix, block_size: int) -> list[tuple[int, int]]:
        """Most tokens that all of each set of holders have."""
        runs: list[tuple[int, int]] = []
        held_by, num_tokens, masks = -1, 0, self._masks
        for block in prefix.blocks(block_size):
            mask = masks.get(block, 0)
            if mask is not held_by and (common := mask & held_by) != held_by:
                if num_tokens:
                    runs.append((num_tokens, held_by))
                if not common:
                    return runs
                held_by = mask if common == mask else common
            num_tokens += block_size
        if num_tokens:
            runs.append((num_tokens, held_by))
        return runs

    def _snapshots(self, prefix: PromptPrefix, block_size: int) -> list[tuple[int, int]]:
        """Tokens before the last snapshot that all of each set of holders have."""
        found: list[tuple[int, int]] = []
        held_by, num_tokens = -1, 0
        for block in prefix.blocks(block_size):
            held_by &= self._masks.get(block, 0)
            if not held_by:
                break
            num_tokens += block_size
            if mask := self._masks.get(short_snapshot(block), 0) & held_by:
                found.append((num_tokens, mask))
        runs: list[tuple[int, int]] = []
        have = 0
        for num_tokens, mask in reversed(found):
            if mask | have != have:
                have |= mask
                runs.append((num_tokens, have))
        return runs

    def add_replica(self, kind: _Kind) -> None:
        self._num_by_kind[kind] += 1

    def remove_replica(self, kind: _Kind) -> None:
        self._num_by_kind[kind] -= 1
        if not self._num_by_kind[kind]:
            del self._num_by_kind[kind]

    def add(self, blocks: Iterable[int], bit: int) -> None:
        """One replica has stored these."""
        masks, before, after = self._masks, 0, bit
        for block in blocks:
            mask = masks.get(block, 0)
            if mask is not before:
                before, after = mask, mask | bit if mask else bit
            masks[block] = after

    def discard(self, blocks: Iterable[int], bit: int) -> None:
        """One replica has evicted these blocks."""
        masks, before, after = self._masks, bit, 0
        for block in blocks:
            mask = masks.get(block, 0)
            if mask is not before:
                before, after = mask, mask & ~bit
            if after:
                masks[block] = after
            else:
                masks.pop(block, None)


class PrefixIndex:
    """The hashes of the blocks that one replica has cached, and of its resident adapters, kept in its model's
    `PrefixHolders` as well; and of its snapshots, if the model keeps states: then a request begins with the last
    snapshot on its path.
    """

    __slots__ = ("_bit", "_holders", "_kind", "blocks")

    def __init__(self, block_size: int, holders: PrefixHolders, slot: int, *, has_states: bool = False) -> None:
        self._kind = _Kind(block_size, has_states)
        self.blocks: set[int] = set()
        """Blocks of the replica. Read-only."""
        self._holders = holders
        self._bit = 1 << slot
        holders.add_replica(self._kind)

    def __len__(self) -> int:
        return len(self.blocks)

    def apply(self, stored: Collection[int], evicted: Collection[int]) -> None:
        """Takes one batch of cache events. No block is in both lists."""
        self.blocks.update(stored)
        self.blocks.difference_update(evicted)
        self._holders.add(stored, self._bit)
        self._holders.discard(evicted, self._bit)

    def close(self) -> None:
        """The replica was lost, and its cache with it."""
        self._holders.discard(self.blocks, self._bit)
        self.blocks.clear()
        self._holders.remove_replica(self._kind)

    def num_cached_tokens(self, prefix: PromptPrefix) -> int:
        """Leading tokens of a prompt that are cached here. Looks up one block more than are cached."""
        if not self.blocks:
            return 0
        size, has_states = self._kind
        cached = takewhile(self.blocks.__contains__, prefix.blocks(size))
        if not has_states:
            return size * sum(1 for _ in cached)
        ends = (number for number, block in enumerate(cached, 1) if short_snapshot(block) in self.blocks)
        return size * max(ends, default=0)
