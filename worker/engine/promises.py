"""Promises: which blocks of a prefix can be brought into the cache, from the store below it or from another replica,
whose blocks may have another number of tokens. A core without IO.
"""

from collections.abc import Sequence, Set

from holdfast.worker.block_hash import HashChain
from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.engine.restore import Restore
from holdfast.worker.engine.tier_mover import KV, STATE, TierShape
from holdfast.worker.request import BlockSource, Priority


class Promises:
    """Looks prefixes up on the leader's engine. Used by one thread."""

    def __init__(
        self, allocator: BlockAllocator, slots: StateSlots | None, shape: TierShape, stored: Set[bytes]
    ) -> None:
        """`stored` are the names in the store."""
        self._cache = allocator.prefix_cache
        self._size = allocator.block_size
        self._slots = slots
        self._shape = shape
        self._stored = stored

    def find(
        self, chain: HashChain, token_ids: Sequence[int], priority: Priority, source: BlockSource | None
    ) -> Restore | None:
        """A restore of the part of a prefix that is in the store alone, or that another replica has of it if that is
        more; None: there is none.
        """
        size = self._size
        most = (len(token_ids) - 1) // size
        num_here = self.num_here(chain, token_ids)
        num_there = 0 if source is None else min(most, self._num_there(source, len(token_ids)))
        end = num_here
        while end < most and KV + chain.hash_of(end, token_ids, size) in self._stored:
            end += 1
        if end >= num_there:
            source = None
        else:
            end = num_there
        state: tuple[bytes, ...] = ()
        usable = num_here
        if self._slots is not None:
            usable, _ = self._slots.deepest(chain, token_ids, num_here)
            if source is None:
                end, state = self._deepest_state(chain, token_ids, usable, end)
            else:
                state = (STATE + chain.hash_of(end - 1, token_ids, size),)
        if end <= usable:
            return None
        names = [KV + chain.hash_of(index, token_ids, size) for index in range(num_here, end)]
        there = 0 if source is None else source.block_size
        return Restore(
            ticket=0,
            priority=priority,
            chain=chain,
            token_ids=token_ids,
            first=num_here,
            names=[*names, *state],
            asked=self._named_there(chain, token_ids, num_here, end, there) or [*names, *state],
            depth=end,
            num_tokens=(end - usable) * size,
            num_bytes=len(names) * self._shape.block_bytes + len(state) * self._shape.state_bytes,
            source=source,
        )

    def num_here(self, chain: HashChain, token_ids: Sequence[int]) -> int:
        """Blocks of a sequence that are cached, from the first one on."""
        return len(self._cache.find(chain, token_ids, (len(token_ids) - 1) // self._size))

    def _num_there(self, source: BlockSource, num_tokens: int) -> int:
        """Blocks, of this replica's size, that another one has of a sequence. States go between equal sizes alone."""
        there = source.block_size or self._size
        if self._slots is not None and there != self._size:
            return 0
        return min(source.num_tokens, num_tokens) // there * there // self._size

    def _named_there(self, chain: HashChain, token_ids: Sequence[int], first: int, end: int, there: int) -> list[bytes]:
        """Names of another replica's blocks of `there` tokens that cover blocks `first` to `end`; none if they are the
        same.
        """
        if there in (0, self._size):
            return []
        other = HashChain.known([chain.hash_of(-1, token_ids, self._size)])
        covering = range(first * self._size // there, -(-end * self._size // there))
        return [KV + other.hash_of(index, token_ids, there) for index in covering]

    def _deepest_state(
        self, chain: HashChain, token_ids: Sequence[int], usable: int, end: int
    ) -> tuple[int, tuple[bytes, ...]]:
        """Number of blocks, above `usable` and up to `end`, after which there is a state; its name if it is only in the
        store.
        """
        assert self._slots is not None, "the model keeps states"
        for depth in range(end, usable, -1):
            block_hash = chain.hash_of(depth - 1, token_ids, self._size)
            if self._slots.holder_of(block_hash) is not None:
                return depth, ()
            if STATE + block_hash in self._stored:
                return depth, (STATE + block_hash,)
        return usable, ()
