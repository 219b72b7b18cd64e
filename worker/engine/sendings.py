"""Sendings: blocks that go to other replicas. A core without IO.

Another replica asks for blocks by name. Cached blocks are copied between two steps, in the order of the requests,
within a time budget: a share of the steps' time, and all of it while nothing runs. No block is pinned for it: if a
block is evicted meanwhile, the transfer ends, and the other replica computes the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.worker.cache.prefix_cache import PrefixCache
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.engine.tier_mover import KV, STATE, Mover, Place, TierShape

SHARE: Final = 0.03
"""Share of the steps' time that blocks for other replicas may cost them: copies, digests and sending."""
LEAVING_SHARE: Final = 0.1
"""The same on a replica that leaves: its requests run on until their blocks are elsewhere."""
MAX_BUDGET_S: Final = 0.1
"""Most seconds of it that are saved up."""
MAX_SENDINGS: Final = 64
"""More are refused: the asker computes."""
STALL_S: Final = 10.0
"""Blocks that are computed now are waited for so long, from one to the next."""
MIN_BYTES: Final = 1 << 20
"""While steps run, fewer are copied only at the end, so that a piece is worth its order."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sending:
    """Blocks requested by another replica."""

    number: int
    names: Sequence[bytes]
    due_s: float
    """Time at which it ends, complete or not."""
    waits: bool = False
    """Whether blocks that are not here are computed now, and are waited for."""
    is_leaving: bool = False
    """Whether this replica leaves, and the blocks go ahead of a request."""
    num_sent: int = 0


class Sendings:
    """Sendings of the leader's engine. Used by one thread."""

    def __init__(
        self, cache: PrefixCache, slots: StateSlots | None, mover: Mover, shape: TierShape, moves: set[int]
    ) -> None:
        """`moves` has a number while one is open."""
        self._cache = cache
        self._slots = slots
        self._mover = mover
        self._shape = shape
        self._moves = moves
        self._sendings: dict[int, Sending] = {}
        self._count = 0
        self._budget_s = 0.0
        self.num_sent_blocks = 0

    @property
    def has_room(self) -> bool:
        """Whether another replica may ask for blocks now."""
        return len(self._sendings) < MAX_SENDINGS

    @property
    def is_busy(self) -> bool:
        """Whether a sending is open."""
        return bool(self._sendings)

    def found(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """Blocks of a prefix, named by their keys and values, that are here and of use: the first ones; of a model that
        keeps states those up to the deepest snapshot, and that one last.
        """
        num_here = next((number for number, name in enumerate(names) if self._place_of(name) is None), len(names))
        if self._slots is None:
            return names[:num_here]
        for depth in range(num_here, 0, -1):
            if self._place_of(state := STATE + names[depth - 1][len(KV) :]) is not None:
                return [*names[:depth], state]
        return ()

    def begin(
        self, names: Sequence[bytes], now: float, lasts_s: float, *, waits: bool = False, is_leaving: bool = False
    ) -> int:
        """Begins to send the found blocks, for `lasts_s` at most; returns the number by which ranks know it. `waits`:
        blocks are sent once they are here. `is_leaving`: they may cost more of the steps' time.
        """
        self._count += 1
        due_s = now + (STALL_S if waits else lasts_s)
        sending = Sending(number=self._count, names=names, due_s=due_s, waits=waits, is_leaving=is_leaving)
        self._sendings[sending.number] = sending
        self._moves.add(-sending.number)
        return sending.number

    def advance(self, step_s: float | None, now: float) -> None:
        """Copies some blocks. `step_s`: how long the last step took; None: nothing runs."""
        if not self._sendings:
            return
        if step_s is not None:
            share = LEAVING_SHARE if any(one.is_leaving for one in self._sendings.values()) else SHARE
            self._budget_s = min(MAX_BUDGET_S, self._budget_s + share * step_s)
        for sending in list(self._sendings.values()):
            self._advance(sending, step_s is None, now)

    def end_all(self) -> None:
        """Ends all: the cache belongs to other weights now."""
        for sending in list(self._sendings.values()):
            self._end(sending)

    @property
    def next_due_s(self) -> float:
        """Time at which the first sending ends, complete or not."""
        return min((one.due_s for one in self._sendings.values()), default=float("inf"))

    def _advance(self, sending: Sending, is_idle: bool, now: float) -> None:
        while (has_room := self._mover.sends_room(sending.number)) and now < sending.due_s:
            places = self._next_places(sending, is_idle)
            if not places:
                break
            self._mover.send(sending.number, places)
            sending.num_sent += len(places)
            self.num_sent_blocks += len(places)
            if sending.waits:
                sending.due_s = now + STALL_S
        is_over = has_room is None or now >= sending.due_s or sending.num_sent == len(sending.names)
        if is_over or (not sending.waits and self._place_of(sending.names[sending.num_sent]) is None):
            self._end(sending)

    def _next_places(self, sending: Sending, is_idle: bool) -> list[Place]:
        """The next blocks to copy, one piece at most; none if the steps leave no time, or none is here."""
        counts = self._mover.counts
        each_s = counts.copy_s_per_byte + counts.send_s_per_byte / self._shape.num_threads
        names = sending.names[sending.num_sent : sending.num_sent + self._shape.piece]
        if not is_idle:
            num_bytes = min(MIN_BYTES, sum(map(self._shape.bytes_of, names)))
            if num_bytes * each_s > self._budget_s:
                return []
        places: list[Place] = []
        spent_s = 0.0
        for name in names:
            place = self._place_of(name)
            if place is None or (not is_idle and places and spent_s > self._budget_s):
                break
            places.append((name, place))
            spent_s += self._shape.bytes_of(name) * each_s
        if not is_idle:
            self._budget_s -= spent_s  # what is beyond it, the next steps pay
        return places

    def _place_of(self, name: bytes) -> int | None:
        if name.startswith(KV):
            return self._cache.block_of(name[1:])
        return None if self._slots is None else self._slots.holder_of(name[1:])

    def _end(self, sending: Sending) -> None:
        del self._sendings[sending.number]
        self._moves.discard(-sending.number)
        self._mover.send(sending.number, ())
