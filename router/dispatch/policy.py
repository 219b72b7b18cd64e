"""Routing policies: pure functions that choose a request's replica from a snapshot of a model's replicas. A policy
never fails: the snapshot has an open replica.
"""

import math
from bisect import bisect, insort
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from holdfast.router.config import PolicyName
from holdfast.router.dispatch.prefix_index import EVERY, NO_MATCH, PrefixMatch

NUM_POINTS: Final = 64
"""Places of each replica on the ring: shares of the circle then differ by about 12 %."""


class HashRing:
    """Slots of replicas by their places. Adding one takes a millisecond at a thousand replicas."""

    __slots__ = ("_points",)

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []

    def add(self, replica_id: str, slot: int) -> None:
        for number in range(NUM_POINTS):
            insort(self._points, (_place(f"{replica_id}#{number}"), slot))

    def remove(self, slot: int) -> None:
        self._points = [point for point in self._points if point[1] != slot]

    def walk(self, key: str) -> Iterator[int]:
        """Each slot once, in the order of their places from that of `key` on."""
        points, seen = self._points, set[int]()
        start = bisect(points, (_place(key), -1))
        for step in range(len(points)):
            slot = points[(start + step) % len(points)][1]
            if slot not in seen:
                seen.add(slot)
                yield slot


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


TOKENS_PER_SEQUENCE: Final = 256
"""Uncomputed prompt tokens that count as much as one running sequence."""

COPY_COST: Final = 2
"""Cost of each token of another copy of a cached prefix besides its computation: memory, and other requests' time."""

MAX_COPY_TOKENS: Final = 4 * TOKENS_PER_SEQUENCE
"""A copy costs at most this, however long the prefix is."""

LOAD_BOUND: Final = 1.25
"""Session affinity holds up to this multiple of the mean load: c of consistent hashing with bounded loads."""

CLOSED: Final = math.inf
"""The load of a replica that may not get the request."""

UNKNOWN_TOKEN_S: Final = 1e-3
"""While no replica of a model has measured its speed. Only ratios matter."""

UNKNOWN_ADAPTER_S: Final = 0.1
"""Seconds that an adapter takes to load, while no replica of a model has measured it."""

_NUM_TRIES: Final = 8

Slot = int
"""A replica's place in a snapshot. Slots between those of replicas may be empty; an empty one is closed."""

RandomIndex = Callable[[int], int]
"""`random_index(n)` is uniform in 0..n-1."""


class RoutingSnapshot(NamedTuple):
    """Input of a policy: the replicas of one model as a router knows them now, and the request.

    The sequences are the table's own, so that a choice among a thousand replicas copies nothing.
    """

    scores: Sequence[float]
    """Load by slot, in sequences (`ReplicaState.score`); `CLOSED` where the request may not go."""
    num_open: int
    """Slots that are not closed: at least one."""
    total_score: float
    """Sum of the loads that are not closed."""
    token_s: Sequence[float | None]
    """Seconds that each replica takes to compute a prompt token, as measured; by slot. None: not measured yet."""
    typical_token_s: float
    """The same of a replica that has not measured it."""
    ring: HashRing
    """All replicas of the model, closed ones too; empty unless the policy uses it."""
    last: Slot
    """The replica that the last request went to; -1 before the first."""
    random_index: RandomIndex
    num_prompt_tokens: int = 0
    prefix: PrefixMatch = NO_MATCH
    """Cached prefix of the prompt by replica; empty unless the policy uses it."""
    session_id: str = ""
    open_slots: Sequence[Slot] | None = None
    """Slots that are not closed, in no order, where they are known."""
    adapter_s: float = UNKNOWN_ADAPTER_S
    """Seconds that a replica takes to load an adapter, as last measured."""

    def is_open(self, slot: Slot) -> bool:
        return self.scores[slot] != CLOSED

    def without(self, slots: Collection[Slot]) -> "RoutingSnapshot":
        """The same with these replicas closed as well."""
        closed = set(slots)
        scores = [CLOSED if slot in closed else score for slot, score in enumerate(self.scores)]
        kept = [score for score in scores if score != CLOSED]
        return self._replace(scores=scores, num_open=len(kept), total_score=sum(kept), open_slots=None)

    def draw(self) -> Slot:
        """A random open replica."""
        if self.open_slots is not None:
            return self.open_slots[self.random_index(len(self.open_slots))]
        for _ in range(_NUM_TRIES):
            slot = self.random_index(len(self.scores))
            if self.is_open(slot):
                return slot
        return self._open_slots()[self.random_index(self.num_open)]

    def draw_two(self) -> tuple[Slot, Slot]:
        """Two different random open replicas; with one alone, twice that one."""
        first = self.draw()
        if self.num_open == 1:
            return first, first
        if self.open_slots is not None:
            others = self.open_slots
            second = others[self.random_index(len(others) - 1)]
            return first, others[-1] if second == first else second
        for _ in range(_NUM_TRIES):
            second = self.random_index(len(self.scores) - 1)
            second += second >= first
            if self.is_open(second):
                return first, second
        rest = [slot for slot in self._open_slots() if slot != first]
        return first, rest[self.random_index(len(rest))]

    def draw_of(self, mask: int) -> Slot | None:
        """The less loaded of two open replicas out of a set, given as the bits of an integer; None if no slot is
        open.
        """
        scores = self.scores
        if not mask & (mask - 1):
            only = mask.bit_length() - 1
            return only if only >= 0 and scores[only] != CLOSED else None
        one = self._open_from(mask, self.random_index(len(scores)))
        if one is None:
            return None
        two = self._open_from(mask, self.random_index(len(scores)))
        return one if two is None or scores[one] <= scores[two] else two

    def seconds(self, slot: Slot) -> float:
        """Estimated seconds until a replica has computed the prompt: its queued work, the tokens that are not cached,
        and the load of the request's adapter where it is not resident.

        A running sequence counts as `TOKENS_PER_SEQUENCE`: it shares every step with the prompt.
        """
        num_new = self.num_prompt_tokens - self.prefix.num_cached(slot)
        load_s = 0.0 if self.has_adapter(slot) else self.adapter_s
        return (self.scores[slot] * TOKENS_PER_SEQUENCE + num_new) * self.token_s_of(slot) + load_s

    def copy_s(self, slot: Slot, num_tokens: int) -> float:
        """Cost in seconds of another copy of a prefix of `num_tokens`, and of the request's adapter if there is one, in
        this replica: an adapter takes the place of another, which will be loaded again.
        """
        num_copied = max(0, num_tokens - self.prefix.num_cached(slot))
        load_s = self.adapter_s if self.prefix.residents and not self.has_adapter(slot) else 0.0
        return min(COPY_COST * num_copied, MAX_COPY_TOKENS) * self.token_s_of(slot) + load_s

    def has_adapter(self, slot: Slot) -> bool:
        """Whether the request's adapter is resident there, or it has none."""
        return bool(self.prefix.residents >> slot & 1)

    def token_s_of(self, slot: Slot) -> float:
        """Seconds a prompt token. A replica without measurements counts as average."""
        measured = self.token_s[slot]
        return self.typical_token_s if measured is None else measured

    def _open_slots(self) -> list[Slot]:
        return [slot for slot, score in enumerate(self.scores) if score != CLOSED]

    def _open_from(self, mask: int, start: Slot) -> Slot | None:
        """The first open replica of a set from `start` on, around the end."""
        while mask:
            slot = next_bit(mask, start)
            if self.is_open(slot):
                return slot
            mask &= ~(1 << slot)
        return None


Policy = Callable[[RoutingSnapshot], Slot]


def next_bit(mask: int, start: int) -> int:
    """The lowest set bit of a mask at or above `start`; if there is none, the lowest set bit. Not for 0."""
    above = mask >> start
    return start + (above & -above).bit_length() - 1 if above else (mask & -mask).bit_length() - 1


def set_bits(mask: int) -> Iterator[Slot]:
    """Slots of a set, given as the bits of an integer, the lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def random_choice(snapshot: RoutingSnapshot) -> Slot:
    """Any of them."""
    return snapshot.draw()


def round_robin(snapshot: RoutingSnapshot) -> Slot:
    """One replica after the other, regardless of load."""
    num_slots = len(snapshot.scores)
    after = ((snapshot.last + step) % num_slots for step in range(1, num_slots + 1))
    return next(slot for slot in after if snapshot.is_open(slot))


def least_loaded(snapshot: RoutingSnapshot) -> Slot:
    """The least loaded of all, by reports that are a step old; of several, the next after a random place."""
    smallest = min(snapshot.scores)
    start = snapshot.random_index(len(snapshot.scores))
    try:
        return snapshot.scores.index(smallest, start)
    except ValueError:
        return snapshot.scores.index(smallest)


def power_of_two(snapshot: RoutingSnapshot) -> Slot:
    """The less loaded of two random replicas (Mitzenmacher 2001).

    That is nearly as good as comparing all, and several routers with the same old reports do not all choose the same.
    """
    one, other = snapshot.draw_two()
    return other if snapshot.scores[other] < snapshot.scores[one] else one


def session_affinity(snapshot: RoutingSnapshot) -> Slot:
    """The session's place on a ring of hashes, unless its load is above `LOAD_BOUND` of the mean: then the next one.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016): with a replica more or fewer, few
    sessions move, and none waits behind a crowd. Requests without a session go by power of two choices.
    """
    if not snapshot.session_id:
        return power_of_two(snapshot)
    limit = math.ceil(LOAD_BOUND * (snapshot.total_score + 1) / snapshot.num_open)
    for slot in snapshot.ring.walk(snapshot.session_id):
        if snapshot.is_open(slot) and snapshot.scores[slot] + 1 <= limit:
            return slot
    return power_of_two(snapshot)


def prefix_aware(snapshot: RoutingSnapshot) -> Slot:
    """A replica with the longest cached prefix, or one with the request's adapter, unless another would have the prompt
    computed sooner.

    Estimated seconds are compared, from measured speeds: of the less loaded of two holders, and of the better of two
    random replicas plus the cost of one more copy. So a hot prefix gets a copy more where its holders are loaded, and
    no holder more than its share. An adapter likewise.
    """
    one, two = snapshot.draw_two()
    one_s, two_s = snapshot.seconds(one), snapshot.seconds(two)
    other, other_s = (two, two_s) if two_s < one_s else (one, one_s)
    num_tokens, holders = _holders(snapshot)
    if not holders:
        return other
    holder_s, holder = min((snapshot.seconds(slot), slot) for slot in holders)
    return holder if holder_s <= other_s + snapshot.copy_s(other, num_tokens) else other


def _holders(snapshot: RoutingSnapshot) -> tuple[int, list[Slot]]:
    """The longest prefix that an open replica has, in tokens; one of its holders, and a replica with the adapter."""
    found: list[Slot] = []
    num_tokens, prefix = 0, snapshot.prefix
    for num_cached, mask in prefix.holders:
        holder = snapshot.draw_of(mask)
        if holder is not None:
            num_tokens = num_cached
            found.append(holder)
            break
    if prefix.residents != EVERY and (resident := snapshot.draw_of(prefix.residents)) is not None:
        found.append(resident)
    return num_tokens, found


POLICIES: Final[Mapping[PolicyName, Policy]] = {
    "prefix_aware": prefix_aware,
    "session_affinity": session_affinity,
    "power_of_two": power_of_two,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "random": random_choice,
}
