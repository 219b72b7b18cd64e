"""Routing policies that capacity simulations compare: the router's own, and the usual baselines.

Each has the signature of `router/replicas/policy.py`: from the replicas with room and a `random_index` to one of them.
"""

from collections.abc import Callable, Sequence
from typing import Final

from holdfast.router.replicas.policy import ChooseReplica, RandomIndex, ReplicaT, power_of_two_choices


class RoundRobin:
    """One after the other, whatever their load."""

    def __init__(self) -> None:
        self._num_chosen = 0

    def __call__(self, replicas: Sequence[ReplicaT], random_index: RandomIndex) -> ReplicaT:
        self._num_chosen += 1
        return replicas[self._num_chosen % len(replicas)]


def at_random(replicas: Sequence[ReplicaT], random_index: RandomIndex) -> ReplicaT:
    """Any of them."""
    return replicas[random_index(len(replicas))]


def least_loaded(replicas: Sequence[ReplicaT], random_index: RandomIndex) -> ReplicaT:
    """The emptiest of all, by figures that are a step old. Of several that are as empty, any one."""
    scores = [replica.score for replica in replicas]
    smallest = min(scores)
    emptiest = [replica for replica, score in zip(replicas, scores, strict=True) if score == smallest]
    return emptiest[random_index(len(emptiest))]


PREFIX_AWARE: Final = "prefix_aware"
"""The default of routers: the replica with most of the prompt cached, and otherwise as `power_of_two`."""

ROUTING: Final[dict[str, Callable[[], ChooseReplica]]] = {
    PREFIX_AWARE: lambda: power_of_two_choices,
    "power_of_two": lambda: power_of_two_choices,
    "least_loaded": lambda: least_loaded,
    "round_robin": RoundRobin,
    "random": lambda: at_random,
}
"""By name, for replicas that have none of the prompt cached; each call makes one that has not chosen yet."""
