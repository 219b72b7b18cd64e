"""Load table: the replicas of one model by slot, in the columns that routing policies look at.

What may live here: the columns, and what a policy needs from one request to the next. What may not: what makes a
replica's load (`replica_registry.py`), and the choice (`policy.py`).
"""

from holdfast.router.replicas.hash_ring import HashRing
from holdfast.router.replicas.policy import CLOSED, UNKNOWN_TOKEN_S, RandomIndex, RoutingSnapshot, Slot
from holdfast.router.replicas.prefix_index import NO_MATCH, PrefixHolders, PrefixMatch


class LoadTable:
    """Loads and speeds by slot. Every change takes the same time, however many replicas there are."""

    def __init__(self, *, has_ring: bool) -> None:
        self.scores: list[float] = []
        """`CLOSED` for a replica that may get no request now, and for an empty slot."""
        self.holders = PrefixHolders()
        self.ring = HashRing()
        self.last: Slot = -1
        self.num_open = 0
        self.total_score = 0.0
        """Exact: loads are multiples of 1 / `TOKENS_PER_SEQUENCE`."""
        self._token_s: list[float | None] = []
        self._has_ring = has_ring
        self._free: list[Slot] = []
        self._typical_token_s = UNKNOWN_TOKEN_S
        """As last measured by any of them."""

    def add(self, replica_id: str) -> Slot:
        """A slot for a new replica, which is closed until its load is set."""
        if not self._free:
            self._free.append(len(self.scores))
            self.scores.append(CLOSED)
            self._token_s.append(None)
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

    def set_score(self, slot: Slot, score: float) -> None:
        before = self.scores[slot]
        if before != CLOSED:
            self.num_open -= 1
            self.total_score -= before
        if score != CLOSED:
            self.num_open += 1
            self.total_score += score
        self.scores[slot] = score

    def set_speed(self, slot: Slot, tokens_per_s: float) -> None:
        """Prompt tokens a second, as a replica has measured them."""
        self._token_s[slot] = self._typical_token_s = 1 / tokens_per_s

    def snapshot(
        self, random_index: RandomIndex, num_prompt_tokens: int, prefix: PrefixMatch = NO_MATCH, session_id: str = ""
    ) -> RoutingSnapshot:
        """What a policy may look at for one request. It holds until the next change."""
        return RoutingSnapshot(
            scores=self.scores,
            num_open=self.num_open,
            total_score=self.total_score,
            token_s=self._token_s,
            typical_token_s=self._typical_token_s,
            ring=self.ring,
            last=self.last,
            random_index=random_index,
            num_prompt_tokens=num_prompt_tokens,
            prefix=prefix,
            session_id=session_id,
        )

    def check_integrity(self) -> None:
        """Asserts that the sums are those of the loads."""
        open_scores = [score for score in self.scores if score != CLOSED]
        assert self.num_open == len(open_scores)
        assert self.total_score == sum(open_scores)
