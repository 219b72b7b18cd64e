"""Service discovery: the replicas that a router connects to. Deployments implement `ReplicaDirectory`.

A directory names the replicas that should run and their addresses, and the models that were taken away. Whether a
replica is up, a router finds out over the link.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from holdfast.router.operator_state import NO_OPERATOR_STATE, OperatorState
from holdfast.router.router_losses import RouterLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEndpoint:
    """The address of a replica. A replica that restarts elsewhere may keep its id or take a new one."""

    replica_id: str
    address: str
    """`host:port` of its link."""
    model: str
    """The name that clients use."""
    model_path: str
    """A folder that the router can read, with the tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterEndpoint:
    """A router, as others may send requests to it."""

    address: str
    """`host:port` of its HTTP API."""
    num_open: int = 0
    """Requests that it had open, when it last said so."""
    has_replicas: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryView:
    """State of a directory at one moment."""

    endpoints: frozenset[ReplicaEndpoint]
    removed_models: frozenset[str] = frozenset()
    """Models that were served here and have been removed. A model that is in neither set has only lost its
    replicas."""
    cold_starts: tuple[tuple[str, float], ...] = ()
    """Models that the autoscaler may leave without replicas, with the seconds that requests wait for the first one."""
    operator_state: OperatorState = NO_OPERATOR_STATE
    """Operator state for the routers."""
    routers: frozenset[RouterEndpoint] = frozenset()
    """All routers that serve HTTP."""
    num_on_full_disks: int = 0
    """Routers and replicas on nodes where nothing that ends is replaced, because there is no room for its files."""
    router_losses: frozenset[RouterLoss] = frozenset()
    """Requests that routers were reading when they ended."""


class ReplicaDirectory(Protocol):
    """The authority on which replicas there are."""

    def watch(self) -> AsyncIterator[DirectoryView]:
        """Yields the whole view at once, then again after every change. Never ends by itself.

        A replica that is missing from a view gets no new requests; its running requests continue until its link ends.
        """
