"""Lease directory of routers and replicas, as a Ray actor: who is up, and at which address.

`Directory` is the core, without Ray, clock or IO. `DirectoryDeployment` hosts it as a Serve deployment, so it starts,
is replaced and ends with the application, and leaves no named actor behind. A replaced directory starts empty; members
renew their leases within five seconds, and until then routers keep their links. No request and no token involves it:
members renew every five seconds, routers wait for changes.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from holdfast.cluster.scaling.demand_book import DemandBook, Followed
from holdfast.cluster.serve.ray_internals import listen_on_the_node_alone
from holdfast.cluster.serve.security import ClusterSecurity
from holdfast.router.demand import ModelDemand
from holdfast.router.dispatch.versions import VersionCounts
from holdfast.router.operator_state import NO_OPERATOR_STATE, Change, OperatorState
from holdfast.router.router_losses import RouterLoss
from holdfast.worker.adapter import Adapter
from holdfast.worker.errors import InternalError
from holdfast.worker.replica.processes import OomScore, ProcessId, lower_oom_score

DIRECTORY: Final = "Directory"
"""The name of its deployment."""

LEASE_S: Final = 15.0
"""A member that has not renewed for this long is forgotten. Links break long before; this only clears the name."""

RENEW_S: Final = 5.0
"""A call through Serve takes milliseconds of CPU on both sides: these calls are most of an idle cluster's CPU time."""

SETTLED_S: Final = 8.0
"""Seconds by which every member has registered with a new directory."""

WATCH_S: Final = 20.0
"""A watch without news answers after this long, so that no caller waits on a directory that has been replaced."""

_SETTLE_CHECK_S: Final = 0.2

_EXPIRE_EVERY_S: Final = 2.5
"""While there is a watch. A lease ends so much later at most."""


class Role(StrEnum):
    """Kind of a member of the cluster."""

    REPLICA = "replica"
    ROUTER = "router"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One router or replica, as it describes itself."""

    member_id: str
    role: Role
    address: str | None = None
    """`host:port` where it serves; None while it starts."""
    http_address: str = ""
    """`host:port` of a router's HTTP API; empty where there is none."""
    engine_address: str = ""
    """`host:port` of a replica's engine protocol; empty where it does not speak it."""
    metrics_address: str = ""
    """`host:port` of a replica's own metrics; empty where it serves none."""
    linked: tuple[tuple[str, int], ...] = ()
    """Models that a router has links for, each with the number of its replicas that are up."""
    model: str = ""
    """The name that clients use. Of a replica."""
    application: str = ""
    """The Serve application that it belongs to. Of a replica."""
    version: str = ""
    """`ModelInfo.version`, of a replica that serves."""
    tokenizer_digest: str = ""
    """Digest of the files that routers read a serving replica's tokenizer from."""
    settings: str = ""
    """Settings the member was started with (`router_update.py`)."""
    counts: tuple[VersionCounts, ...] = ()
    """Outcomes of a router's requests, by version."""
    num_open: int = 0
    """Open requests, some seconds ago, of a router that serves as an endpoint picker."""
    is_disk_full: bool = False
    """There is little room under Ray's session folder of its node."""
    operator_state: OperatorState = NO_OPERATOR_STATE
    """Operator state of a router, from which a directory that was replaced learns it."""
    router_losses: tuple[RouterLoss, ...] = ()
    """Known requests that routers were reading when they ended, of a router."""
    model_path: str = ""
    """The folder of the model, of a replica that serves. Routers read the tokenizer there: it is the same on every
    node."""
    adapters: tuple[Adapter, ...] = ()
    """Adapters that a serving replica was started with."""
    phase: str = "loading libraries"
    """Phase of the start, in words."""
    done: int = 0
    total: int = 1
    error: str | None = None
    """Why it cannot start, where that is the caller's mistake and trying again changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All members at one moment. `version` grows with every change."""

    version: int
    members: tuple[Member, ...]
    is_settled: bool
    """False while the directory is so young that members may not have registered yet."""
    removed_models: frozenset[str] = frozenset()
    """Models that someone has taken away, and that no replica has begun to serve since."""
    followed: Followed = ()
    """Models that are scaled by their load, which routers report."""
    operator_state: OperatorState = NO_OPERATOR_STATE
    """Settings ordered by operators."""

    def serving(self, role: Role) -> tuple[Member, ...]:
        """Members that have an address."""
        return tuple(member for member in self.members if member.role is role and member.address is not None)


class Directory:
    """Members and when each was last heard of. Time is passed in, in seconds of any one clock."""

    def __init__(self, now_s: float, first_version: int = 0) -> None:
        self._started_s = now_s
        self._version = first_version
        self._members: dict[str, Member] = {}
        self._renewed_s: dict[str, float] = {}
        self._removed_models: set[str] = set()
        self.demands = DemandBook()
        self.operator_state = NO_OPERATOR_STATE

    def renew(self, member: Member, now_s: float) -> bool:
        """Adds a member or renews its lease. True if the entry has changed, which makes a new version of the view.

        An operator state of a router that is newer than the one known here is taken over.
        """
        if member.operator_state.revision > self.operator_state.revision:
            self.operator_state = member.operator_state
            self._version += 1
        self._renewed_s[member.member_id] = now_s
        before = self._members.get(member.member_id)
        if before == member:
            return False
        self._members[member.member_id] = member
        self._version += 1
        if member.address is not None and (before is None or before.address is None):
            self._removed_models.discard(member.model)
        return True

    def remove_model(self, name: str) -> None:
        """The model was removed: routers refuse it by name, until another replica begins to serve it."""
        self._removed_models.add(name)
        self._version += 1

    def order(self, operator_state: OperatorState) -> None:
        """Takes a new operator state. Raises `InternalError` if someone else has changed it meanwhile."""
        if operator_state.revision != self.operator_state.revision + 1:
            raise InternalError(f"order {operator_state.revision} came after order {self.operator_state.revision}")
        self.operator_state = operator_state
        self._version += 1

    def remove(self, member_id: str) -> None:
        """Forgets a member at once. Unknown ids are ignored."""
        self._renewed_s.pop(member_id, None)
        if self._members.pop(member_id, None) is not None:
            self._version += 1

    def expire(self, now_s: float) -> None:
        """Forgets members whose lease has run out."""
        for member_id, renewed_s in list(self._renewed_s.items()):
            if now_s - renewed_s > LEASE_S:
                self.remove(member_id)
        self._version += self.demands.expire(now_s)

    def note_demand(self, router_id: str, demands: Sequence[ModelDemand], now_s: float) -> None:
        """Notes a router's demand for the models that are followed. It makes no new version."""
        self.demands.note(router_id, demands, now_s)

    def demand(self, model: str, cold_start_wait_s: float | None, now_s: float) -> tuple[ModelDemand | None, bool]:
        """Demand of all routers for a model, which is followed from now on. True: that makes a new version."""
        is_news = self.demands.follow(model, cold_start_wait_s, now_s)
        self._version += is_news
        return self.demands.demand(model, now_s), is_news

    def snapshot(self, now_s: float) -> Snapshot:
        is_settled = now_s - self._started_s > SETTLED_S
        return Snapshot(
            version=self._version,
            members=tuple(self._members.values()),
            is_settled=is_settled,
            removed_models=frozenset(self._removed_models),
            followed=self.demands.followed,
            operator_state=self.operator_state,
        )


class DirectoryDeployment:
    """The directory as an actor. All methods are short but for `watch`."""

    def __init__(self, security: ClusterSecurity) -> None:
        """`security` is what members of this cluster share, and ask for when they start."""
        lower_oom_score(OomScore.ROUTER, [ProcessId.of(os.getpid())])
        listen_on_the_node_alone()
        self._security = security
        # Versions of a replaced directory must not repeat those of the one before.
        self._directory = Directory(time.monotonic(), first_version=time.time_ns())
        self._changed = asyncio.Event()

    async def security(self) -> ClusterSecurity:
        return self._security

    async def renew(self, member: Member) -> None:
        """Renews a member's lease, or adds the member."""
        if self._directory.renew(member, time.monotonic()):
            self._tell()

    async def remove(self, member_id: str) -> None:
        """Removes a member that stops."""
        self._directory.remove(member_id)
        self._tell()

    async def remove_model(self, name: str) -> None:
        """Removes a model and its replicas' entries."""
        self._directory.remove_model(name)
        self._tell()

    async def note_demand(self, router_id: str, demands: Sequence[ModelDemand]) -> None:
        self._directory.note_demand(router_id, demands, time.monotonic())

    async def demand(self, model: str, cold_start_wait_s: float | None) -> tuple[ModelDemand | None, Mapping[str, int]]:
        """Demand of all routers for a model, and the numbers of replicas set by updates, by application.

        Who asks about a model scales it, and asks again every second or so.
        """
        now_s = time.monotonic()
        demand, is_news = self._directory.demand(model, cold_start_wait_s, now_s)
        if is_news:
            self._tell()
        return demand, self._directory.demands.pinned(now_s)

    async def pin(self, application: str, num_replicas: int | None) -> None:
        """Sets the number of replicas of an application that is scaled by its load; None gives it back to the load."""
        self._directory.demands.pin(application, num_replicas, time.monotonic())

    async def order(self, change: Change) -> OperatorState:
        """Applies a change and returns the state after it. Raises `CallerError` for an invalid one.

        A directory that has just been replaced waits until routers have reported the state before.
        """
        while not self._directory.snapshot(time.monotonic()).is_settled:
            await asyncio.sleep(_SETTLE_CHECK_S)
        self._directory.order(change.applied_to(self._directory.operator_state))
        self._tell()
        return self._directory.operator_state

    async def watch(self, seen_version: int) -> Snapshot:
        """All members, as soon as there is something that `seen_version` did not have, or after `WATCH_S`."""
        deadline_s = time.monotonic() + WATCH_S
        while True:
            now_s = time.monotonic()
            self._directory.expire(now_s)
            snapshot = self._directory.snapshot(now_s)
            if snapshot.version != seen_version or now_s >= deadline_s:
                return snapshot
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout=_EXPIRE_EVERY_S)

    def _tell(self) -> None:
        """Wakes every watcher; each looks for itself whether there is news."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
