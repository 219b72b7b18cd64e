"""Service discovery: how a router learns which replicas there are. Deployments implement `ReplicaDirectory`.

A directory names the replicas that should run and their addresses, and the models that were taken away. Whether a
replica is up, a router finds out over the link.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol

from holdfast.router.operator_state import NO_OPERATOR_STATE, OperatorState
from holdfast.router.router_losses import RouterLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEndpoint:
    """The address of a replica. One that restarts elsewhere may keep its id or take a new one."""

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
    """What a directory knows at one moment."""

    endpoints: frozenset[ReplicaEndpoint]
    removed_models: frozenset[str] = frozenset()
    """Models that were served here and are not to be any more. A model that is in neither set has only lost its
    replicas."""
    cold_starts: tuple[tuple[str, float], ...] = ()
    """Models that may be without replicas by decision, and how many seconds requests wait for the first one."""
    orders: OperatorState = NO_OPERATOR_STATE
    """What the cluster's operators want of its routers."""
    routers: frozenset[RouterEndpoint] = frozenset()
    """All routers that serve HTTP."""
    num_on_full_disks: int = 0
    """Routers and replicas on nodes where nothing that ends is replaced, because there is no room for its files."""
    router_losses: frozenset[RouterLoss] = frozenset()
    """What routers were reading when they ended."""


class ReplicaDirectory(Protocol):
    """The authority on which replicas there are."""

    def watch(self) -> AsyncIterator[DirectoryView]:
        """Yields the whole view at once, then again after every change. Never ends by itself.

        A replica that is missing from a view gets no new requests; those that run there continue until its link ends.
        """


class StaticDirectory:
    """A fixed set of replicas, which may be replaced with `set`."""

    def __init__(self, endpoints: Iterable[ReplicaEndpoint] = ()) -> None:
        self._view = DirectoryView(endpoints=frozenset(endpoints))
        self._changed = asyncio.Event()

    def set(
        self,
        endpoints: Iterable[ReplicaEndpoint],
        removed_models: Iterable[str] = (),
        orders: OperatorState | None = None,
        routers: Iterable[RouterEndpoint] = (),
        num_on_full_disks: int = 0,
    ) -> None:
        """Replaces the view. To be called on the event loop of the watchers."""
        self._view = DirectoryView(
            endpoints=frozenset(endpoints),
            removed_models=frozenset(removed_models),
            orders=orders or NO_OPERATOR_STATE,
            routers=frozenset(routers),
            num_on_full_disks=num_on_full_disks,
        )
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[DirectoryView]:
        while True:
            changed = self._changed
            yield self._view
            await changed.wait()
