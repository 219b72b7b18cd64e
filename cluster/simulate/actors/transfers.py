"""Simulated transfers of blocks between replicas, in virtual time: the replica at an address, the time that blocks
take, and the faults on the way.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from holdfast.cluster.simulate.actors.disk import MovingFigures, Row, is_whole
from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.request import BlockSource, PinnedPrefix

ASKING_S: Final = 0.002

Piece = list[tuple[bytes, Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCosts:
    """Times of transfers, and what replicas believe of them."""

    block_s: float = 0.0005
    """Seconds that a block takes on its way."""
    figures: MovingFigures = field(default_factory=MovingFigures)
    """Measured costs, as replicas have them."""
    computing_factor: float = 50.0
    """Factor on the time that replicas believe computing takes: in a world of faults, what others have is always asked
    for.
    """


class TransferEnd(Protocol):
    """Mover of a replica, as the others see it."""

    kind: str
    tier: BlockTier | None

    def post(self, command: Callable[[], None]) -> None:
        """Between two steps, unless the replica has died."""

    def now(self) -> float: ...

    def pins(self) -> list[PinnedPrefix]: ...

    def begin_sending(self, names: Sequence[bytes], source: BlockSource, incoming: "Incoming") -> None:
        """Begins to send, between two steps."""


@dataclass(slots=True, eq=False)
class Incoming:
    """Blocks that one replica has asked another for."""

    asker: "TransferEnd"
    ticket: int
    piece: int
    """Blocks of a piece."""
    pieces: deque[list[bytes]] = field(default_factory=deque)
    """Names of the pieces that are missing."""
    received: Piece = field(default_factory=list)
    """Blocks of the next one."""
    ready: deque[Piece] = field(default_factory=deque)
    free_s: float = 0.0
    """Time at which the connection has sent all its data."""
    is_over: bool = False

    def settle(self, names: Sequence[bytes], num_blocks: int) -> None:
        """These come, blocks of keys and values and maybe a snapshot behind them."""
        self.pieces = deque(list(names[first : first + self.piece]) for first in range(0, len(names), self.piece))
        self.asker.post(partial(self._tell, num_blocks))

    def _tell(self, num_blocks: int) -> None:
        if self.asker.tier is not None:
            self.asker.tier.restores.settle(self.ticket, num_blocks)

    def cut(self) -> None:
        """No further piece comes, and the asker hears of it."""
        if not self.is_over:
            self.is_over = True
            self.asker.post(lambda: self.asker.tier.restores.cut(self.ticket) if self.asker.tier else None)


class SimulatedTransfers:
    """The connections between the ranks of all replicas."""

    def __init__(self, rng: random.Random, after: Callable[..., None], costs: TransferCosts | None = None) -> None:
        """After `after` calls, whichever processes have died meanwhile."""
        self.costs = costs or TransferCosts()
        self._rng = rng
        self._after = after
        self._ends: dict[str, TransferEnd] = {}
        self._open: list[tuple[str, Incoming]] = []
        self.slowness = 1.0
        self.damage = 0.0
        """Share of blocks that are changed on the way."""
        self.num_sent = 0

    def register(self, address: str, end: TransferEnd) -> None:
        """A new life of the replica at an address. What its last one was sending is cut."""
        self._ends[address] = end
        for sender, incoming in self._open:
            if sender == address:
                incoming.cut()
        self._open = [one for one in self._open if not one[1].is_over]

    def ask(self, asker: TransferEnd, ticket: int, source: BlockSource, names: Sequence[bytes], piece: int) -> Incoming:
        """Asks the replica at an address for blocks."""
        incoming = Incoming(asker, ticket, piece)
        self._after(ASKING_S * self.slowness, self._begin, source, list(names), incoming)
        return incoming

    def ask_for_pins(self, asker: TransferEnd, address: str) -> None:
        """Asks the draining replica at an address for its pinned prefixes."""
        self._after(ASKING_S * self.slowness, self._hand_pins_on, asker, address)

    def _hand_pins_on(self, asker: TransferEnd, address: str) -> None:
        sender = self._ends.get(address)
        if sender is not None and sender.tier is not None and sender.kind == asker.kind:
            sender.post(lambda: self._after(ASKING_S * self.slowness, self._take_pins, asker, sender.pins(), address))

    def _take_pins(self, asker: TransferEnd, pins: list[PinnedPrefix], address: str) -> None:
        asker.post(lambda: asker.tier.takeover.take(pins, address, asker.now()) if asker.tier else None)

    def cut_all(self) -> None:
        """All connections are lost."""
        for _, incoming in self._open:
            incoming.cut()
        self._open.clear()

    def deliver(self, incoming: Incoming, rows: Piece) -> None:
        """Sends blocks after the earlier ones."""
        digests = [row.digest for _, row in rows]
        changed = [(name, self._changed(row)) for name, row in rows]
        begins_s = max(incoming.free_s, incoming.asker.now())
        incoming.free_s = begins_s + self.costs.block_s * len(rows) * self.slowness
        self.num_sent += len(rows)
        self._after(incoming.free_s - incoming.asker.now(), self._arrive, incoming, changed, digests)

    def _changed(self, row: Row) -> Row:
        if isinstance(row.content, bytes) and self._rng.random() < self.damage:
            return row._replace(content=bytes(one ^ 1 for one in row.content))
        return row

    def _begin(self, source: BlockSource, names: list[bytes], incoming: Incoming) -> None:
        sender = self._ends.get(source.address)
        if sender is None or sender.tier is None or sender.kind != incoming.asker.kind:
            incoming.cut()
            return
        self._open.append((source.address, incoming))
        sender.post(lambda: sender.begin_sending(names, source, incoming))

    def _arrive(self, incoming: Incoming, rows: Piece, digests: list[int]) -> None:
        for (name, row), digest in zip(rows, digests, strict=True):
            if incoming.is_over:
                return
            if not is_whole(row, digest):
                incoming.cut()
                return
            incoming.received.append((name, row))
            if len(incoming.received) == len(incoming.pieces[0]):
                self._hand_on(incoming)

    def _hand_on(self, incoming: Incoming) -> None:
        incoming.pieces.popleft()
        incoming.ready.append(incoming.received)
        incoming.received = []
        incoming.is_over = not incoming.pieces
        asker = incoming.asker
        asker.post(lambda: asker.tier.restores.note_piece(incoming.ticket) if asker.tier else None)
