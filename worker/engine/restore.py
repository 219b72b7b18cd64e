"""Restore: a prefix on its way from the store below the cache, or from another replica (`restores.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.worker.block_hash import HashChain
from holdfast.worker.request import BlockSource, Priority


class Expected(NamedTuple):
    """Blocks that another replica sends."""

    names: Sequence[bytes]
    """Names of the blocks that are made of them, in order, and of a snapshot behind them."""
    sent: Sequence[bytes]
    """Names of the blocks that are sent, in order."""
    num_skipped: int
    """Tokens of the first one that are here already."""


@dataclass(slots=True, eq=False, kw_only=True)
class Restore:
    """A prefix that is brought back."""

    ticket: int
    priority: Priority
    """The best of the requests that wait for it."""
    tenant: str = ""
    turn: int = 0
    """Restores of its tenant that were held when it came."""
    chain: HashChain
    token_ids: Sequence[int]
    first: int
    """The number of the first block that is brought back."""
    names: Sequence[bytes]
    """Names of keys and values in order, and of a snapshot behind the last of them."""
    asked: Sequence[bytes]
    """The same as the source names them: another replica's blocks may have another number of tokens, and then reach
    further at either end."""
    depth: int
    """Blocks of the sequence that can be used afterwards."""
    num_tokens: int
    """Tokens that then need not be computed."""
    num_bytes: int
    source: BlockSource | None = None
    """The replica that has them; None: the store."""
    computed_s: float = 0.0
    """When computing could have ended; a restore that has begun is given up then."""
    due_s: float = 0.0
    """When a restore that waits for room is given up."""
    is_begun: bool = False
    """Whether its pieces are being read; else it waits for room."""
    num_ready: int = 0
    """Pieces that were read and are not in the cache yet."""
    num_taken: int = 0
    """Names that are in the cache."""
    is_cut: bool = False
    """Whether no further piece comes."""
    has_failed: bool = False
    is_ahead: bool = False
    """Whether it is for a request that comes later."""
    is_handed_on: bool = False
    """Whether another replica has handed its pin on: no request waits for it."""
    num_hit_tokens: int = 0
    """Tokens that it has brought back from the store; known once it has ended."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the sequence, from the first one on, whose blocks are in the cache, if none was evicted."""
        return (self.first + self.num_taken) * self.num_tokens // max(1, self.depth - self.first)

    @property
    def is_over(self) -> bool:
        """Whether no further block will come: it failed, was cut, or the core has taken all blocks."""
        is_cut = self.is_cut and not self.num_ready
        return self.has_failed or is_cut or self.num_taken == len(self.names)

    @property
    def order(self) -> tuple[Priority, int, int]:
        """Position in the queue for memory."""
        return self.priority, self.turn, self.ticket

    @property
    def next_look_s(self) -> float:
        """When it is given up."""
        return self.computed_s if self.is_begun else self.due_s
