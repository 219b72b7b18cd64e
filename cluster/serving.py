"""A cluster that serves, seen from the process that started it: bring it up, know its addresses, take it down.

What may live here: driving Ray and Serve from outside. What may not: what runs inside them (`app.py`).
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from cluster.config import HoldfastConfig
from cluster.directory import Member, Role, Snapshot
from cluster.local import num_cpus_of_our_own, ray_connection, share_cores
from cluster.progress import Report
from worker.errors import ConfigurationError, ReplicaError

logger = logging.getLogger(__name__)

STATUS_PERIOD_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A cluster that is up."""

    routers: tuple[str, ...]
    """`host:port` of each router's gRPC API."""
    model: str
    num_replicas: int


@contextmanager
def serving(config: HoldfastConfig, report: Report) -> Iterator[Serving]:
    """Runs a cluster for as long as the block lasts: on Ray of our own, or on the cluster at `cluster.address`.

    Enters the block when every router and replica is up. Leaving it drains routers and replicas and stops them; then our
    own Ray, and with it every process. Raises `ConfigurationError` for what cannot work, `ReplicaError` where Serve
    gives up.
    """
    config = share_cores(config)
    report("starting Ray", 0, 1)
    with ray_connection(config.cluster, num_cpus_of_our_own(config)):
        report("starting Ray", 1, 1)
        from ray import serve

        try:
            directory = _deploy(config, report)
            yield _wait_until_up(config, directory, report)
        finally:
            report("stopping", 0, 1)
            serve.delete(config.cluster.namespace)
    report("stopping", 1, 1)


def _deploy(config: HoldfastConfig, report: Report) -> Any:
    """Hands the application to Serve, which goes on by itself. Returns the directory's handle."""
    from ray import serve

    from cluster.app import DIRECTORY, application

    report("starting Serve", 0, 1)
    serve.start(proxy_location="Disabled")
    name = config.cluster.namespace
    serve.run_many(
        [serve.RunTarget(target=application(config), name=name, route_prefix=None)], wait_for_applications_running=False
    )
    report("starting Serve", 1, 1)
    return serve.get_deployment_handle(DIRECTORY, name)


def _wait_until_up(config: HoldfastConfig, directory: Any, report: Report) -> Serving:
    """Watches members come up and says what they are doing."""
    shown = _StartUp(report, config.cluster.replicas)
    report("starting processes", 0, 1)
    version = 0
    while True:
        snapshot = _next_snapshot(config, directory, version)
        version = snapshot.version
        shown.show(snapshot)
        replicas, routers = snapshot.serving(Role.REPLICA), snapshot.serving(Role.ROUTER)
        if len(replicas) >= config.cluster.replicas and len(routers) >= config.cluster.routers:
            addresses = tuple(sorted(str(router.address) for router in routers))
            return Serving(routers=addresses, model=replicas[0].model, num_replicas=len(replicas))


def _next_snapshot(config: HoldfastConfig, directory: Any, version: int) -> Snapshot:
    """The next news of the directory. Raises what makes waiting for it pointless."""
    response = directory.watch.remote(version)
    while True:
        try:
            snapshot: Snapshot = response.result(timeout_s=STATUS_PERIOD_S)
        except TimeoutError:
            _raise_if_given_up(config.cluster.namespace)
            continue
        for member in snapshot.members:
            if member.error is not None:
                raise ConfigurationError(member.error)
        return snapshot


def _raise_if_given_up(name: str) -> None:
    from ray import serve

    status = serve.status().applications[name]
    if status.status == "DEPLOY_FAILED":
        reasons = [deployment.message for deployment in status.deployments.values() if deployment.message]
        raise ReplicaError(f"Serve gave up: {' '.join([status.message, *reasons])}")


class _StartUp:
    """Numbers the members in the order in which they show up, and reports each one's phases in turn."""

    def __init__(self, report: Report, num_replicas: int) -> None:
        self._report = report
        self._num_replicas = num_replicas
        self._seen: dict[str, Member] = {}

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.members:
            self._report("starting processes", 1, 1)
        for member in snapshot.members:
            before = self._seen.get(member.member_id)
            self._seen[member.member_id] = member
            if member.role is Role.REPLICA and member != before:
                self._show_replica(member, before)

    def _show_replica(self, member: Member, before: Member | None) -> None:
        replicas = [known for known in self._seen.values() if known.role is Role.REPLICA]
        number = next(index for index, known in enumerate(replicas, 1) if known.member_id == member.member_id)
        name = f"replica {number}/{self._num_replicas}"
        if before is not None and before.phase != member.phase:
            self._report(f"{name}: {before.phase}", 1, 1)
        if member.address is None:
            self._report(f"{name}: {member.phase}", member.done, member.total)
