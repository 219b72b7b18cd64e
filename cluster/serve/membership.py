"""Clients of the lease directory: `Lease` renews a member's entry, `WatchedDirectory` follows it for a router.

`handle` is the Serve handle of `DirectoryDeployment`.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from ray import serve
from ray.serve.exceptions import RayServeException

from holdfast.cluster.scaling.demand_book import Followed
from holdfast.cluster.serve.directory import DIRECTORY, RENEW_S, Member, Role, Snapshot
from holdfast.cluster.serve.security import ClusterSecurity
from holdfast.router.demand import ModelDemand
from holdfast.router.links.replica_directory import DirectoryView, ReplicaEndpoint, RouterEndpoint

logger = logging.getLogger(__name__)

_TIMEOUT_S = 1.0

TELL_S: Final = 0.5
TELL_AGAIN_S: Final = 2.0

Demands = tuple[ModelDemand, ...]


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
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds; a later turn tries again
            logger.info("the directory did not answer: %r", error)


class WatchedDirectory:
    """A `ReplicaDirectory` for a router."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.followed: Followed = ()
        """Models that are scaled by their load, as last heard."""
        self.has_followed = asyncio.Event()
        """Whether there are any."""

    async def watch(self) -> AsyncIterator[DirectoryView]:
        """Every view once. A directory that was replaced may at first add replicas, but not remove any. It does not
        know which models were removed, so these stay removed until a replica serves them again, nor the operators'
        orders, which stay in force.
        """
        known: DirectoryView | None = None
        seen_version = 0
        while True:
            snapshot = await self._next(seen_version)
            seen_version = snapshot.version
            self._note_followed(snapshot)
            endpoints, removed, operator_state = _endpoints(snapshot), snapshot.removed_models, snapshot.operator_state
            cold_starts = tuple((model, wait_s) for model, wait_s in snapshot.followed if wait_s is not None)
            if known is not None:
                endpoints |= frozenset() if snapshot.is_settled else known.endpoints
                removed |= known.removed_models - {endpoint.model for endpoint in endpoints}
                operator_state = max(known.operator_state, operator_state, key=lambda one: one.revision)
                if not snapshot.is_settled:
                    cold_starts = tuple((dict(known.cold_starts) | dict(cold_starts)).items())
            found = DirectoryView(
                endpoints=endpoints,
                removed_models=removed,
                cold_starts=cold_starts,
                operator_state=operator_state,
                routers=_routers(snapshot, known),
                num_on_full_disks=sum(member.is_disk_full for member in snapshot.members),
                router_losses=frozenset(loss for member in snapshot.members for loss in member.router_losses),
            )
            if found != known:
                known = found
                yield known

    def _note_followed(self, snapshot: Snapshot) -> None:
        self.followed = snapshot.followed
        if self.followed:
            self.has_followed.set()
        else:
            self.has_followed.clear()

    async def _next(self, seen_version: int) -> Snapshot:
        while True:
            try:
                snapshot = await _call(self._handle.watch, seen_version)
            except Exception as error:  # noqa: BLE001 - as in `Lease`
                logger.info("the directory did not answer: %r", error)
                await asyncio.sleep(RENEW_S)
            else:
                assert isinstance(snapshot, Snapshot)
                return snapshot


async def tell_demand(handle: Any, router_id: str, directory: WatchedDirectory, read: Callable[[], Demands]) -> None:
    """Reports the demand for the followed models to the directory, until it is cancelled.

    Unchanged values are sent again from time to time, as heartbeats.
    """
    last: Demands = ()
    told_s = 0.0
    while True:
        await directory.has_followed.wait()
        await asyncio.sleep(TELL_S)
        followed = {model for model, _ in directory.followed}
        demands = tuple(one for one in read() if one.model in followed)
        now_s = asyncio.get_running_loop().time()
        if not demands or (demands == last and now_s - told_s < TELL_AGAIN_S):
            continue
        try:
            await asyncio.wait_for(_call(handle.note_demand, router_id, demands), _TIMEOUT_S)
            last, told_s = demands, now_s
        except Exception as error:  # noqa: BLE001 - as in `Lease`
            logger.info("the directory did not answer: %r", error)


async def has_other_routers(handle: Any, member_id: str) -> bool:
    """Whether routers other than this one serve. False where the directory does not say: it ends with the cluster."""
    try:
        snapshot = await asyncio.wait_for(_call(handle.watch, 0), _TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - as in `Lease`
        logger.info("the directory did not answer: %r", error)
        return False
    assert isinstance(snapshot, Snapshot)
    return any(router.member_id != member_id for router in snapshot.serving(Role.ROUTER))


async def cluster_security(handle: Any) -> ClusterSecurity:
    """Security of the cluster, from the directory. Asks again until it answers."""
    while True:
        try:
            security = await _call(handle.security)
        except Exception as error:  # noqa: BLE001 - as in `Lease`
            logger.info("the directory did not answer: %r", error)
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
        if member.address is not None and member.application not in snapshot.operator_state.held
    )


def _routers(snapshot: Snapshot, known: DirectoryView | None) -> frozenset[RouterEndpoint]:
    """Routers that serve HTTP. A directory that was replaced may not know all of them yet."""
    old = () if known is None or snapshot.is_settled else known.routers
    routers = {one.address: one for one in old} | {
        member.http_address: RouterEndpoint(
            address=member.http_address, num_open=member.num_open, has_replicas=any(count for _, count in member.linked)
        )
        for member in snapshot.serving(Role.ROUTER)
        if member.http_address
    }
    return frozenset(routers.values())


async def _call(method: Any, *arguments: object) -> object:
    """Serve's responses can be awaited but are no coroutines, which `wait_for` wants."""
    return await method.remote(*arguments)
