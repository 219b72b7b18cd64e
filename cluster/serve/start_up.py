"""Start-up of a cluster or a model: its processes that are up, the progress that is shown, and the time limit."""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve import models
from holdfast.cluster.serve.directory import Member, Role, Snapshot
from holdfast.worker.errors import ConfigurationError, ReplicaError
from holdfast.worker.progress import Report

STARTING: Final = "starting processes"

STATUS_PERIOD_S: Final = 1.0
"""Seconds between questions to Serve whether it has given up."""

LINK_TIMEOUT_S: Final = 10.0
"""Seconds that routers may take to reach serving replicas, with ample margin."""

UNLINKED_S: Final = 60.0
"""Seconds after which a router without a link to a replica counts as unable to reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A cluster that is up."""

    routers: tuple[str, ...]
    """`host:port` of each router's gRPC API."""
    http: tuple[str, ...]
    """`host:port` of each router's HTTP API, in the same order; empty without."""
    front: str = ""
    """`host:port` of the one HTTP address before all routers; empty without."""
    engines: tuple[str, ...] = ()
    """`host:port` of each replica's engine protocol, where it is served."""
    num_replicas: Mapping[str, int]
    """Replicas of each model, by its name."""

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self.num_replicas)


def wait_until_up(config: HoldfastConfig, wanted: Mapping[str, int], directory: Any, report: Report) -> Serving:
    """Watches members come up and prints their progress, until each model has `wanted` replicas."""
    shown = StartUp(report, wanted)
    up_since_s: float | None = None
    version = 0
    while True:
        snapshot = _next_snapshot(config, wanted, directory, version, report)
        version = snapshot.version
        shown.show(snapshot)
        routers = snapshot.serving(Role.ROUTER)
        serving = Counter(replica.model for replica in snapshot.serving(Role.REPLICA))
        if serving >= Counter(wanted) and len(routers) >= config.cluster.routers:
            up_since_s = time.monotonic() if up_since_s is None else up_since_s
            if not are_linked(routers, serving):
                _check_reaching(routers, serving, time.monotonic() - up_since_s)
                continue  # from the first moment on, no request is to find a router empty
            ordered = sorted(routers, key=lambda router: str(router.address))
            return Serving(
                routers=tuple(str(router.address) for router in ordered),
                http=tuple(router.http_address for router in ordered if router.http_address),
                engines=tuple(one.engine_address for one in snapshot.serving(Role.REPLICA) if one.engine_address),
                num_replicas={name: serving[name] for name in wanted},
            )


def are_linked(routers: Sequence[Member], num_replicas: Mapping[str, int]) -> bool:
    """Whether each router says that it has reached every replica."""
    return all(
        dict(router.linked).get(name, 0) >= number for router in routers for name, number in num_replicas.items()
    )


def _check_reaching(routers: Sequence[Member], num_replicas: Mapping[str, int], waited_s: float) -> None:
    """Raises `ReplicaError` where routers have not reached replicas for so long that waiting has no point."""
    if waited_s < UNLINKED_S:
        return
    found = "; ".join(
        f"the router at {router.address} reaches {dict(router.linked).get(name, 0)} of {number} replicas of {name}"
        for router in routers
        for name, number in num_replicas.items()
        if dict(router.linked).get(name, 0) < number
    )
    raise ReplicaError(
        f"all processes are up, and {found}, after {waited_s:.0f} s: does a firewall block connections "
        "between their nodes? `holdfast logs` shows what the routers say"
    )


def _next_snapshot(
    config: HoldfastConfig, wanted: Mapping[str, int], directory: Any, version: int, report: Report
) -> Snapshot:
    """The next state of the directory. Raises what makes waiting for it pointless, and what `report` raises."""
    from ray.exceptions import RayActorError

    response = directory.watch.remote(version)
    while True:
        report(STARTING, 0, 1)  # again and again: it may raise, which ends the wait
        try:
            snapshot: Snapshot = response.result(timeout_s=STATUS_PERIOD_S)
        except TimeoutError:
            _raise_if_given_up(config.cluster.namespace, wanted)
            continue
        except RayActorError:  # Serve starts the directory again, and its members register there
            _raise_if_given_up(config.cluster.namespace, wanted)
            response = directory.watch.remote(version)
            continue
        for member in snapshot.members:
            if member.error is not None and (member.role is Role.ROUTER or member.model in wanted):
                raise ConfigurationError(member.error)
        return snapshot


def _raise_if_given_up(namespace: str, wanted: Collection[str]) -> None:
    from ray import serve

    ours = {namespace, *(models.application_name(namespace, name) for name in wanted)}
    for application, status in serve.status().applications.items():
        if status.status == "DEPLOY_FAILED" and application in ours:
            reasons = [deployment.message for deployment in status.deployments.values() if deployment.message]
            raise ReplicaError(f"Serve gave up: {' '.join([status.message, *reasons])}")


class StartUp:
    """Numbers the members in the order in which they show up, and reports each one's phases in turn."""

    def __init__(self, report: Report, num_replicas: Mapping[str, int]) -> None:
        """`num_replicas` is that of each model, by its name."""
        self._report = report
        self._num_replicas = num_replicas
        self._seen: dict[str, Member] = {}

    def show(self, snapshot: Snapshot) -> None:
        """Shows the changes since the last snapshot."""
        if snapshot.members:
            self._report(STARTING, 1, 1)
        for member in snapshot.members:
            before = self._seen.get(member.member_id)
            self._seen[member.member_id] = member
            if member.role is Role.REPLICA and member != before and member.model in self._num_replicas:
                self._show_replica(member, before)

    def _show_replica(self, member: Member, before: Member | None) -> None:
        replicas = [
            known for known in self._seen.values() if known.role is Role.REPLICA and known.model == member.model
        ]
        number = next(index for index, known in enumerate(replicas, 1) if known.member_id == member.member_id)
        of_model = f" of {member.model}" if len(self._num_replicas) > 1 else ""
        name = f"replica {number}/{max(number, self._num_replicas.get(member.model, 0))}{of_model}"
        if before is not None and before.phase != member.phase:
            self._report(f"{name}: {before.phase}", 1, 1)
        if member.address is None:
            self._report(f"{name}: {member.phase}", member.done, member.total)
