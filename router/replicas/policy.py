"""Which replica gets a request: the one that has most of its prompt cached, or the emptier of two taken at random.

Two at random are nearly as good as looking at all, and several routers that look at the same stale figures do not all
run to the same replica. No `random` module here: chance is passed in, so that a run can be repeated.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from holdfast.worker.request import EngineLoad

TOKENS_PER_SEQUENCE: Final = 256
"""So many prompt tokens that still have to be computed weigh as much as one sequence that is running."""

MAX_LEAD: Final = 4.0
"""A replica with a cached prefix may be fuller than the emptiest by so many sequences, and by what the prefix saves."""

RandomIndex = Callable[[int], int]
"""`random_index(n)` is uniform in 0..n-1."""


class Loaded(Protocol):
    """Something with a load: smaller is emptier."""

    @property
    def score(self) -> float: ...


ReplicaT = TypeVar("ReplicaT", bound=Loaded)


class ChooseReplica(Protocol):
    """A way to choose one of several replicas that have room. Never called with none."""

    def __call__(self, replicas: Sequence[ReplicaT], random_index: RandomIndex) -> ReplicaT: ...


def load_score(load: EngineLoad, num_sent: int = 0, num_sent_tokens: int = 0, num_open: int = 0) -> float:
    """How full a replica is: sequences, plus prompt tokens to compute in units of `TOKENS_PER_SEQUENCE`.

    `num_sent` and `num_sent_tokens` are what this router has sent since the replica reported. `num_open`, what this
    router has there in all, is a floor: a report that crossed a submission on the wire does not make a replica empty.
    """
    num_sequences = max(load.num_running + load.num_waiting + num_sent, num_open)
    return num_sequences + (load.num_waiting_tokens + num_sent_tokens) / TOKENS_PER_SEQUENCE


def power_of_two_choices(replicas: Sequence[ReplicaT], random_index: RandomIndex) -> ReplicaT:
    """The emptier of two different replicas taken at random; the only one if there is but one. Never of none."""
    assert replicas, "there must be a replica to choose"
    if len(replicas) == 1:
        return replicas[0]
    first = random_index(len(replicas))
    second = random_index(len(replicas) - 1)
    second += second >= first
    one, other = replicas[first], replicas[second]
    return other if other.score < one.score else one


def longest_prefix(replicas: Sequence[ReplicaT], num_cached: Sequence[int], random_index: RandomIndex) -> ReplicaT:
    """The replica with the longest cached prefix, unless it is too full; without one, power of two choices.

    `num_cached[i]` are the prompt's leading tokens that `replicas[i]` has cached. Too full is `MAX_LEAD` sequences more
    than the emptiest, plus the prefix's own tokens in sequences: from there on, computing the prefix again elsewhere
    costs less than waiting. The other replica then has it as well, so a hot prefix spreads as far as its load asks for.
    """
    longest = max(num_cached)
    if longest == 0:
        return power_of_two_choices(replicas, random_index)
    holders = [replica for replica, num in zip(replicas, num_cached, strict=True) if num == longest]
    holder = power_of_two_choices(holders, random_index)
    limit = min(replica.score for replica in replicas) + MAX_LEAD + longest / TOKENS_PER_SEQUENCE
    return holder if holder.score <= limit else power_of_two_choices(replicas, random_index)
