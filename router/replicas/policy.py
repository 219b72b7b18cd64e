"""Load balancing: prefix-aware routing, and power of two choices where no replica has the prefix.

Power of two choices takes the less loaded of two random replicas. That is nearly as good as comparing all, and several
routers with the same stale loads do not all choose the same replica. Random numbers are passed in, so that a run can be
repeated; no `random` module here.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from holdfast.worker.request import EngineLoad

TOKENS_PER_SEQUENCE: Final = 256
"""Uncomputed prompt tokens that count as much as one running sequence."""

MAX_LEAD: Final = 4.0
"""Sequences by which a replica with a cached prefix may be above the least loaded, besides what the prefix saves."""

RandomIndex = Callable[[int], int]
"""`random_index(n)` is uniform in 0..n-1."""


class Loaded(Protocol):
    """Something with a load score; smaller is less loaded."""

    @property
    def score(self) -> float: ...


ReplicaT = TypeVar("ReplicaT", bound=Loaded)


class ChooseReplica(Protocol):
    """A way to choose one of several replicas that have room. Never called with none."""

    def __call__(self, replicas: Sequence[ReplicaT], random_index: RandomIndex) -> ReplicaT: ...


def load_score(load: EngineLoad, num_sent: int = 0, num_sent_tokens: int = 0, num_open: int = 0) -> float:
    """The load of a replica: sequences, plus prompt tokens to compute in units of `TOKENS_PER_SEQUENCE`.

    `num_sent` and `num_sent_tokens` count what this router has sent since the replica's last report. `num_open`, all
    attempts of this router there, is a lower bound: a report may have been sent before a submission arrived.
    """
    num_sequences = max(load.num_running + load.num_waiting + num_sent, num_open)
    return num_sequences + (load.num_waiting_tokens + num_sent_tokens) / TOKENS_PER_SEQUENCE


def power_of_two_choices(replicas: Sequence[ReplicaT], random_index: RandomIndex) -> ReplicaT:
    """The less loaded of two different random replicas; with one replica, that one."""
    assert replicas, "there must be a replica to choose"
    if len(replicas) == 1:
        return replicas[0]
    first = random_index(len(replicas))
    second = random_index(len(replicas) - 1)
    second += second >= first
    one, other = replicas[first], replicas[second]
    return other if other.score < one.score else one


def longest_prefix(replicas: Sequence[ReplicaT], num_cached: Sequence[int], random_index: RandomIndex) -> ReplicaT:
    """The replica with the longest cached prefix, unless it is too loaded; otherwise power of two choices.

    `num_cached[i]` counts the prompt's leading tokens that `replicas[i]` has cached. Too loaded is `MAX_LEAD` sequences
    above the least loaded, plus the prefix's own tokens in sequences: beyond that, computing the prefix elsewhere costs
    less than waiting. The other replica then caches it too, so a hot prefix spreads with its load.
    """
    longest = max(num_cached)
    if longest == 0:
        return power_of_two_choices(replicas, random_index)
    holders = [replica for replica, num in zip(replicas, num_cached, strict=True) if num == longest]
    holder = power_of_two_choices(holders, random_index)
    limit = min(replica.score for replica in replicas) + MAX_LEAD + longest / TOKENS_PER_SEQUENCE
    return holder if holder.score <= limit else power_of_two_choices(replicas, random_index)
