"""Clients of the lease directory: `Lease` renews a member's entry, `WatchedDirectory` follows it for a router.

`handle` is the Serve handle of `DirectoryDeployment`. What may not live here: what a member is (`directory.py`).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from holdfast.cluster.serve.directory import DIRECTORY, RENEW_S, Member, Role, Snapshot
from holdfast.cluster.serve.security import ClusterSecurity
from holdfast.router.links.replica_directory import DirectoryView, ReplicaEndpoint

logger = logging.getLogger(__name__)

_TIMEOUT_S = 1.0


class Lease:
    """Renews one member's entry in the directory until it is ended."""

    def __init__(self, handle: Any, member: Member) -> None:
        self._handle = handle
        self._changed = asyncio.Event()
        self.member = member
        self._task = asyncio.create_task(self._keep())

    def update(self, member: Member) -> None:
        """Publishes a changed entry at once. On the event loop that made the lease."""
        self.member = member
        self._changed.set()

    async def flush(self) -> None:
        """Waits until the directory has the latest entry, if there is a directory."""
        await self._tell(self._handle.renew, self.member)

    async def end(self) -> None:
        """Takes the member out of the directory. Gives up soon: the directory may be ending at the same time."""
        self._task.cancel()
        await self._tell(self._handle.remove, self.member.member_id)

    async def _keep(self) -> None:
        while True:
            self._changed.clear()
            await self._tell(self._handle.renew, self.member)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), RENEW_S)

    async def _tell(self, method: Any, argument: object) -> None:
        try:
            await asyncio.wait_for(_call(method, argument), _TIMEOUT_S)
        except Exception as error:  # Ray raises many kinds while a directory is replaced; a later turn tries again
            logger.info("the directory did not answer: %s", error)


class WatchedDirectory:
    """A `ReplicaDirectory` for a router."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def watch(self) -> AsyncIterator[DirectoryView]:
        """Every view once. A directory that was replaced may add replicas at first, not take any away; and it does not
        know which models were removed, which therefore stay so until a replica serves them again, nor what was
        ordered, which therefore holds on.
        """
        known: DirectoryView | None = None
        seen_version = 0
        while True:
            snapshot = await self._next(seen_version)
            seen_version = snapshot.version
            endpoints, removed, orders = _endpoints(snapshot), snapshot.removed_models, snapshot.orders
            if known is not None:
                endpoints |= frozenset() if snapshot.is_settled else known.endpoints
                removed |= known.removed_models - {endpoint.model for endpoint in endpoints}
                orders = max(known.orders, orders, key=lambda one: one.revision)
            found = DirectoryView(endpoints=endpoints, removed_models=removed, orders=orders)
            if found != known:
                known = found
                yield known

    async def _next(self, seen_version: int) -> Snapshot:
        while True:
            try:
                snapshot = await _call(self._handle.watch, seen_version)
            except Exception as error:  # as in `Lease`
                logger.info("the directory did not answer: %s", error)
                await asyncio.sleep(RENEW_S)
            else:
                assert isinstance(snapshot, Snapshot)
                return snapshot


async def has_other_routers(handle: Any, member_id: str) -> bool:
    """Whether routers other than this one serve. False where the directory does not say: it ends with the cluster."""
    try:
        snapshot = await asyncio.wait_for(_call(handle.watch, 0), _TIMEOUT_S)
    except Exception as error:  # as in `Lease`
        logger.info("the directory did not answer: %s", error)
        return False
    assert isinstance(snapshot, Snapshot)
    return any(router.member_id != member_id for router in snapshot.serving(Role.ROUTER))


async def cluster_security(handle: Any) -> ClusterSecurity:
    """What the members of a cluster share. Asks again until the directory answers."""
    while True:
        try:
            security = await _call(handle.security)
        except Exception as error:  # as in `Lease`
            logger.info("the directory did not answer: %s", error)
            await asyncio.sleep(RENEW_S)
        else:
            assert isinstance(security, ClusterSecurity)
            return security


async def found(directory: Any) -> Any:
    """The handle of a directory: itself, or that of the application of a name, which may be deployed later."""
    if not isinstance(directory, str):
        return directory
    while True:
        try:
            return serve.get_deployment_handle(DIRECTORY, directory)
        except RayServeException as error:
            logger.info("the application %s has no directory yet: %s", directory, error)
            await asyncio.sleep(RENEW_S)


def _endpoints(snapshot: Snapshot) -> frozenset[ReplicaEndpoint]:
    return frozenset(
        ReplicaEndpoint(
            replica_id=member.member_id, address=member.address, model=member.model, model_path=member.model_path
        )
        for member in snapshot.serving(Role.REPLICA)
        if member.address is not None and member.application not in snapshot.orders.held
    )


async def _call(method: Any, *arguments: object) -> object:
    """Serve's responses can be awaited but are no coroutines, which `wait_for` wants."""
    return await method.remote(*arguments)
