"""Replica directory of a router that runs without a cluster."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from holdfast.router.links.replica_directory import DirectoryView, ReplicaEndpoint, RouterEndpoint
from holdfast.router.operator_state import NO_OPERATOR_STATE, OperatorState


class StaticDirectory:
    """A fixed set of replicas, which may be replaced with `set`."""

    def __init__(self, endpoints: Iterable[ReplicaEndpoint] = ()) -> None:
        self._view = DirectoryView(endpoints=frozenset(endpoints))
        self._changed = asyncio.Event()

    def set(
        self,
        endpoints: Iterable[ReplicaEndpoint],
        removed_models: Iterable[str] = (),
        operator_state: OperatorState | None = None,
        routers: Iterable[RouterEndpoint] = (),
        num_on_full_disks: int = 0,
    ) -> None:
        """Replaces the view. To be called on the event loop of the watchers."""
        self._view = DirectoryView(
            endpoints=frozenset(endpoints),
            removed_models=frozenset(removed_models),
            operator_state=operator_state or NO_OPERATOR_STATE,
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
