"""Load table of a model: what its replicas have to do, and how fast they are, as routing policies compare it."""

from holdfast.router.dispatch.policy import (
    CLOSED,
    UNKNOWN_ADAPTER_S,
    UNKNOWN_TOKEN_S,
    HashRing,
    RandomIndex,
    RoutingSnapshot,
    Slot,
)
from holdfast.router.dispatch.prefix_index import NO_MATCH, PrefixHolders, PrefixMatch


class Loads:
    """Loads by slot. Every change takes the same time, however many replicas there are."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        """`CLOSED` for a replica that may get no request now, and for an empty slot."""
        self.num_open = 0
        self.total_score = 0.0
        """Exact: loads are multiples of 1 / `TOKENS_PER_SEQUENCE`."""

    def set_score(self, slot: Slot, score: float) -> None:
        before = self.scores[slot]
        if before != CLOSED:
            self.num_open -= 1
            self.total_score -= before
        if score != CLOSED:
            self.num_open += 1
            self.total_score += score
        self.scores[slot] = score


class PartOfLoads(Loads):
    """Loads of those replicas of a table that may get one kind of prompts; all others are closed."""

    def __init__(self, table: Loads, members: int) -> None:
        """`members`: slots, as an integer's bits."""
        super().__init__()
        self.members = members
        self.open_slots: list[Slot] = []
        """In no order."""
        self._places: dict[Slot, int] = {}
        for slot, score in enumerate(table.scores):
            self.scores.append(CLOSED)
            self.set_score(slot, score)

    def set_score(self, slot: Slot, score: float) -> None:
        """Sets a member's score, and adds or removes its slot as it opens or closes."""
        if not self.members >> slot & 1:
            return
        if (score != CLOSED) != (slot in self._places):
            self._turn(slot)
        super().set_score(slot, score)

    def _turn(self, slot: Slot) -> None:
        """A slot that was closed is open now, or the other way round."""
        place = self._places.pop(slot, None)
        if place is None:
            self._places[slot] = len(self.open_slots)
            self.open_slots.append(slot)
            return
        last = self.open_slots.pop()
        if last != slot:
            self.open_slots[place] = last
            self._places[last] = place


class LoadTable(Loads):
    """Loads and speeds by slot."""

    def __init__(self, *, has_ring: bool) -> None:
        super().__init__()
        self.holders = PrefixHolders()
        self.ring = HashRing()
        self.last: Slot = -1
        self.parts: tuple[PartOfLoads, ...] = ()
        """Replicas that decode, and replicas that compute long prompts; empty without roles."""
        self._token_s: list[float | None] = []
        self._has_ring = has_ring
        self._free: list[Slot] = []
        self._typical_token_s = UNKNOWN_TOKEN_S
        """Seconds per token as last measured by any replica."""
        self.adapter_s = UNKNOWN_ADAPTER_S
        """Seconds that an adapter took to load, as last measured by any replica."""

    def add(self, replica_id: str) -> Slot:
        """A slot for a new replica, which is closed until its load is set."""
        if not self._free:
            self._free.append(len(self.scores))
            self.scores.append(CLOSED)
            self._token_s.append(None)
            for part in self.parts:
                part.scores.append(CLOSED)
        slot = self._free.pop()
        if self._has_ring:
            self.ring.add(replica_id, slot)
        return slot

    def remove(self, slot: Slot) -> None:
        """The replica was lost. Another may get its slot."""
        self.set_score(slot, CLOSED)
        self._token_s[slot] = None
        self._free.append(slot)
        if self._has_ring:
            self.ring.remove(slot)

    def divide(self, *members: int) -> None:
        """Keeps the loads of these replicas apart too: slots, as the bits of integers."""
        self.parts = tuple(PartOfLoads(self, mask) for mask in members)

    def set_score(self, slot: Slot, score: float) -> None:
        """Sets a slot's score here and in every part."""
        super().set_score(slot, score)
        for part in self.parts:
            part.set_score(slot, score)

    def set_speed(self, slot: Slot, tokens_per_s: float) -> None:
        """Prompt tokens a second, as a replica has measured them."""
        self._token_s[slot] = self._typical_token_s = 1 / tokens_per_s

    def snapshot(
        self,
        random_index: RandomIndex,
        num_prompt_tokens: int,
        prefix: PrefixMatch = NO_MATCH,
        session_id: str = "",
        part: PartOfLoads | None = None,
    ) -> RoutingSnapshot:
        """Input of a policy for one request. It is valid until the next change."""
        loads: Loads = self if part is None else part
        return RoutingSnapshot(
            scores=loads.scores,
            num_open=loads.num_open,
            total_score=loads.total_score,
            token_s=self._token_s,
            typical_token_s=self._typical_token_s,
            ring=self.ring,
            last=self.last,
            random_index=random_index,
            num_prompt_tokens=num_prompt_tokens,
            prefix=prefix if part is None else prefix.among(part.members),
            session_id=session_id,
            open_slots=None if part is None else part.open_slots,
            adapter_s=self.adapter_s,
        )

    def check_integrity(self) -> None:
        """Asserts that the sums are those of the loads."""
        open_scores = [score for score in self.scores if score != CLOSED]
        assert self.num_open == len(open_scores)
        assert self.total_score == sum(open_scores)
        for part in self.parts:
            among = {slot for slot, score in enumerate(self.scores) if score != CLOSED and part.members >> slot & 1}
            assert sorted(part.open_slots) == sorted(among)
            assert part.num_open == len(among)
            assert part.total_score == sum(self.scores[slot] for slot in among)
