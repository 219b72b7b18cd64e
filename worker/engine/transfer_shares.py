"""Transfer shares: which ranks of another replica one rank sends blocks to, and which it gets them from. The other
replica may have another number of ranks, and blocks of another number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from holdfast.worker.engine.block_frames import Block
from holdfast.worker.engine.incoming_blocks import Sender, Taker, Transfer
from holdfast.worker.engine.restore import Expected
from holdfast.worker.engine.transfer_key import TransferKey
from holdfast.worker.executors.block_layout import BlockLayout, Heads, Regrouping, heads_from
from holdfast.worker.executors.kv_cache import BlockMemory
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup


class SendingReplica(NamedTuple):
    """Another replica that sends blocks."""

    addresses: Sequence[tuple[str, int]]
    """Addresses of its ranks."""
    heads: Sequence[Heads]
    """KV heads of each rank."""
    block_size: int
    is_computing: bool = False
    """Whether it computes them now."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part in transfers."""

    layout: BlockLayout
    rank: int
    heads: Sequence[Heads]
    """KV heads of all ranks of this replica."""

    @classmethod
    def of(cls, memory: BlockMemory | None, group: TensorParallelGroup) -> "RankShare | None":
        """All ranks call this together. None: these blocks cannot be cut otherwise."""
        if memory is None or memory.layout is None:
            return None
        layout = memory.layout
        if not layout.heads:  # all of its layers keep states
            return cls(layout, group.rank, [()] * group.size)
        own = np.array([[heads[0], len(heads)] for heads in layout.heads], np.int32)
        packed = torch.frombuffer(bytearray(own.tobytes()), dtype=torch.uint8)[None]
        everywhere = group.all_gather(packed, dim=0).numpy().view(np.int32).reshape(group.size, -1, 2)
        by_rank = [tuple(tuple(range(first, first + count)) for first, count in rank) for rank in everywhere.tolist()]
        return cls(layout, group.rank, by_rank)

    def _shares(self, heads: Heads, rank: int) -> bool:
        """Whether blocks go between this rank and one of another replica, of which these heads are in them."""
        return any(heads) or (not self.layout.heads and rank == self.rank)

    def takers(self, key: TransferKey, theirs: Sequence[Heads]) -> list[Taker]:
        """Ranks of another replica, with these heads, that get some of this rank's."""
        takers = []
        for rank in range(len(theirs)):
            heads = heads_from(self.rank, self.heads, rank, theirs)
            if self._shares(heads, rank):
                cut = None if heads == self.layout.heads else partial(self._cut, heads)
                takers.append(Taker(key.of_rank(rank), cut))
        return takers

    def _cut(self, heads: Heads, block: Block) -> Block:
        name, row = block
        return name, self.layout.cut(row, heads)

    def transfer(self, key: TransferKey, there: SendingReplica, expected: Expected) -> Transfer:
        """This rank's share of a transfer that comes."""
        senders, parts = [], []
        for rank, address in enumerate(there.addresses):
            heads = heads_from(rank, there.heads, self.rank, self.heads)
            if self._shares(heads, rank):
                senders.append(Sender(address, key.of_rank(self.rank)))
                parts.append(heads)
        regrouping = None
        if there.block_size != self.layout.block_size or parts != [self.layout.heads]:
            regrouping = Regrouping(self.layout, there.block_size, parts, expected.num_skipped)
        return Transfer(senders, expected.sent, expected.names, regrouping, there.is_computing)


def read_heads(ranks: Sequence[Sequence[Sequence[int]]]) -> list[Heads]:
    """Heads as they were before they became lists of lists."""
    return [tuple(map(tuple, heads)) for heads in ranks]
