"""Fault injection of one simulation: kind, time and duration of each fault are drawn from its seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from holdfast.cluster.simulate.actors.client import SITE as CLIENTS
from holdfast.cluster.simulate.actors.disk import SimulatedDisk
from holdfast.cluster.simulate.actors.replica import SimulatedReplica
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.actors.transfers import SimulatedTransfers
from holdfast.cluster.simulate.kernel.network import Network, Path
from holdfast.cluster.simulate.kernel.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFault:
    """One thing that goes wrong. `router` and `replica` say where; which of them counts depends on the kind."""

    kind: str
    time_s: float
    duration_s: float
    router: int
    replica: int
    size: float
    """Severity in 0..1."""
    release: str = ""
    """Release that replicas run after an update."""


class Cluster(Protocol):
    """The cluster that faults are applied to."""

    timeline: Timeline
    network: Network
    routers: list[SimulatedRouter]
    replicas: list[SimulatedReplica]
    disk: SimulatedDisk | None
    transfers: SimulatedTransfers | None

    def note_clock_jump(self, seconds: float) -> None: ...

    def retire_versions(self) -> None:
        """Tells routers which versions no replica will serve again."""


def draw_faults(rng: random.Random, span_s: float, num_routers: int, num_replicas: int) -> list[SimulatedFault]:
    """Draws up to a dozen faults, of few kinds or of many."""
    drawn = tuple(kind for kind in KINDS if kind not in (UPDATE, HOST_LOSS, *DISK_KINDS, *TRANSFER_KINDS, *PIN_KINDS))
    kinds = rng.sample(drawn, rng.randint(1, len(drawn)))
    faults = [
        SimulatedFault(
            kind=rng.choice(kinds),
            time_s=rng.uniform(0, 1.2 * span_s),
            duration_s=rng.choice((0.05, 0.5, 2.0, 8.0)) * rng.uniform(0.5, 1.5),
            router=rng.randrange(num_routers),
            replica=rng.randrange(num_replicas),
            size=rng.random(),
        )
        for _ in range(rng.choice((0, 1, 2, 4, 8, 12)))
    ]
    return sorted(faults, key=lambda fault: fault.time_s)


def draw_updates(rng: random.Random, span_s: float, num_replicas: int) -> list[SimulatedFault]:
    """Draws a rolling update in one simulation of four; some of these get a second one, which may begin before the end
    of the first.
    """
    return [
        SimulatedFault(
            kind=UPDATE,
            time_s=rng.uniform(0, span_s),
            duration_s=num_replicas * rng.choice((0.2, 1.0, 3.0)) * rng.uniform(0.5, 1.5),
            router=0,
            replica=0,
            size=rng.random(),
            release=f"release {number}",
        )
        for number in range(1, 1 + rng.choices((0, 1, 2), weights=(9, 2, 1))[0])
    ]


def draw_store_faults(
    rng: random.Random, span_s: float, kinds: Sequence[str], num_replicas: int = 1
) -> list[SimulatedFault]:
    """Draws a few faults of the disk that has the replicas' block stores, or of transfers between replicas, or orders
    of operators that end pins.
    """
    return [
        SimulatedFault(
            kind=rng.choice(kinds),
            time_s=rng.uniform(0, 1.2 * span_s),
            duration_s=rng.choice((0.5, 2.0)),
            router=0,
            replica=rng.randrange(num_replicas) if num_replicas > 1 else 0,
            size=rng.random(),
        )
        for _ in range(rng.choice((0, 1, 3, 6)))
    ]


def draw_host_losses(rng: random.Random, span_s: float, num_replicas: int) -> list[SimulatedFault]:
    """Draws the loss of a host in one simulation of eight."""
    if rng.random() > 1 / 8:
        return []
    loss = SimulatedFault(
        kind=HOST_LOSS,
        time_s=rng.uniform(0, span_s),
        duration_s=rng.choice((0.1, 1.0, 5.0)),
        router=0,
        replica=rng.randrange(num_replicas),
        size=rng.random(),
    )
    return [loss]


def strike(cluster: Cluster, fault: SimulatedFault) -> None:
    """Applies a fault, and schedules its end."""
    KINDS[fault.kind](cluster, fault)


def slowness(fault: SimulatedFault) -> float:
    """Factor on the time of a replica's steps."""
    return 1 + 9 * fault.size


def _kill_replica(cluster: Cluster, fault: SimulatedFault) -> None:
    replica = cluster.replicas[fault.replica]
    if replica.is_up:
        (replica.vanish if fault.size < 0.3 else replica.kill)()
        cluster.timeline.after(fault.duration_s, replica.revive)


def _lose_host(cluster: Cluster, fault: SimulatedFault) -> None:
    """A host ends: its replicas go one after the other, within the fault's time, and come again after it."""
    host = cluster.replicas[fault.replica].host
    lost = [replica for replica in cluster.replicas if replica.host == host]
    for number, replica in enumerate(lost):
        cluster.timeline.after(number * fault.duration_s / len(lost), replica.kill)
        cluster.timeline.after(fault.duration_s, replica.revive)


def _freeze_replica(cluster: Cluster, fault: SimulatedFault) -> None:
    """A replica that has work and makes no progress is condemned: killed, and started anew."""
    replica = cluster.replicas[fault.replica]
    if replica.is_up and not replica.is_frozen:
        replica.freeze()
        cluster.timeline.after(fault.duration_s, replica.thaw)


def _drain_replica(cluster: Cluster, fault: SimulatedFault) -> None:
    """Drains a replica, which is replaced or called back at the end of the fault."""
    replica = cluster.replicas[fault.replica]
    replica.retire(True)
    if fault.size < 0.3:
        cluster.timeline.after(fault.duration_s, replica.retire, False)
    else:
        cluster.timeline.after(fault.duration_s, replica.replace)


def _update_replicas(cluster: Cluster, fault: SimulatedFault) -> None:
    """Replica after replica drains for its share of the time, and comes again with another release."""
    share_s = fault.duration_s / len(cluster.replicas)
    for number, replica in enumerate(cluster.replicas):
        cluster.timeline.after(number * share_s, replica.retire, True)
        cluster.timeline.after((number + 1) * share_s, replica.update, fault.release)
    cluster.timeline.after(fault.duration_s, cluster.retire_versions)


def _slow_replica(cluster: Cluster, fault: SimulatedFault) -> None:
    replica = cluster.replicas[fault.replica]
    replica.slowness = slowness(fault)
    cluster.timeline.after(fault.duration_s, replica.recover)


def _kill_router(cluster: Cluster, fault: SimulatedFault) -> None:
    router = cluster.routers[fault.router]
    if router.is_up:
        (router.vanish if fault.size < 0.3 else router.kill)()
        cluster.timeline.after(fault.duration_s, router.revive)


def _freeze_router(cluster: Cluster, fault: SimulatedFault) -> None:
    router = cluster.routers[fault.router]
    if router.is_up and not router.is_frozen:
        router.freeze()
        cluster.timeline.after(fault.duration_s, router.thaw)


def _drain_router(cluster: Cluster, fault: SimulatedFault) -> None:
    """Drains a router: its calls end at once if another router can take them, else they have their time."""
    router = cluster.routers[fault.router]
    if router.is_up and not router.is_frozen:
        others = [other for other in cluster.routers if other is not router]
        router.stop(hands_over=any(other.is_up and not other.is_stopping for other in others))
        cluster.timeline.after(fault.duration_s, router.replace)


def _jump_clock(cluster: Cluster, fault: SimulatedFault) -> None:
    seconds = 10 * (fault.size - 0.5)
    cluster.note_clock_jump(seconds)
    cluster.routers[fault.router].jump_clock(seconds)


def _cut_link(cluster: Cluster, fault: SimulatedFault) -> None:
    for connection in list(_link(cluster, fault).connections):
        connection.cut(loses=fault.size < 0.5)


def _cut_calls(cluster: Cluster, fault: SimulatedFault) -> None:
    for connection in list(_calls(cluster, fault).connections):
        connection.cut(loses=fault.size < 0.5)


def _partition_link(cluster: Cluster, fault: SimulatedFault) -> None:
    _partition(cluster, _link(cluster, fault), fault.duration_s)


def _partition_calls(cluster: Cluster, fault: SimulatedFault) -> None:
    _partition(cluster, _calls(cluster, fault), fault.duration_s)


def _slow_link(cluster: Cluster, fault: SimulatedFault) -> None:
    path = _link(cluster, fault)
    path.slowness = 1 + 99 * fault.size
    cluster.timeline.after(fault.duration_s, cluster.network.heal, path)


def _partition(cluster: Cluster, path: Path, duration_s: float) -> None:
    cluster.network.block(path)
    cluster.timeline.after(duration_s, cluster.network.heal, path)


def _link(cluster: Cluster, fault: SimulatedFault) -> Path:
    return cluster.network.path(cluster.routers[fault.router].site, cluster.replicas[fault.replica].site)


def _calls(cluster: Cluster, fault: SimulatedFault) -> Path:
    return cluster.network.path(CLIENTS, cluster.routers[fault.router].site)


def _lose_disk(cluster: Cluster, fault: SimulatedFault) -> None:
    if cluster.disk is not None:
        cluster.disk.lose()


def _damage_disk(cluster: Cluster, fault: SimulatedFault) -> None:
    if cluster.disk is not None:
        cluster.disk.damage(fault.size)


def _slow_disk(cluster: Cluster, fault: SimulatedFault) -> None:
    """Up to a hundred times as slow: requests that wait for it go on without."""
    disk = cluster.disk
    if disk is not None:
        disk.slowness = 100**fault.size
        cluster.timeline.after(fault.duration_s, _heal_disk, disk)


def _heal_disk(disk: SimulatedDisk) -> None:
    disk.slowness = 1.0


def _cut_transfers(cluster: Cluster, fault: SimulatedFault) -> None:
    if cluster.transfers is not None:
        cluster.transfers.cut_all()


def _damage_transfers(cluster: Cluster, fault: SimulatedFault) -> None:
    transfers = cluster.transfers
    if transfers is not None:
        transfers.damage = fault.size
        cluster.timeline.after(fault.duration_s, _heal_transfers, transfers)


def _slow_transfers(cluster: Cluster, fault: SimulatedFault) -> None:
    """Up to a thousand times as slow: requests that wait for blocks go on without."""
    transfers = cluster.transfers
    if transfers is not None:
        transfers.slowness = 1000**fault.size
        cluster.timeline.after(fault.duration_s, _heal_transfers, transfers)


def _heal_transfers(transfers: SimulatedTransfers) -> None:
    transfers.slowness, transfers.damage = 1.0, 0.0


def _unpin(cluster: Cluster, fault: SimulatedFault) -> None:
    """An operator's order: all pins of a tenant end on all replicas, or one pin on one of them."""
    replica = cluster.replicas[fault.replica]
    if fault.size < 0.5 and replica.is_up:
        replica.unpin_one()
    elif fault.size >= 0.5:
        tenant = TENANTS[int(fault.size * 100) % len(TENANTS)]
        for one in cluster.replicas:
            if one.is_up:
                one.unpin(tenant)


UPDATE: Final = "update replicas"
HOST_LOSS: Final = "lose host"
TRANSFER_KINDS: Final = ("cut transfers", "damage transfers", "slow transfers")
PIN_KINDS: Final = ("unpin",)
TENANTS: Final = ("", "gold", "free")
DISK_KINDS: Final = ("lose disk", "damage disk", "slow disk")

KINDS: Final[dict[str, Callable[[Cluster, SimulatedFault], None]]] = {
    "kill replica": _kill_replica,
    "freeze replica": _freeze_replica,
    "drain replica": _drain_replica,
    "slow replica": _slow_replica,
    UPDATE: _update_replicas,
    HOST_LOSS: _lose_host,
    "kill router": _kill_router,
    "freeze router": _freeze_router,
    "drain router": _drain_router,
    "jump clock": _jump_clock,
    "cut link": _cut_link,
    "cut calls": _cut_calls,
    "partition link": _partition_link,
    "partition calls": _partition_calls,
    "slow link": _slow_link,
    "lose disk": _lose_disk,
    "damage disk": _damage_disk,
    "slow disk": _slow_disk,
    "cut transfers": _cut_transfers,
    "damage transfers": _damage_transfers,
    "slow transfers": _slow_transfers,
    "unpin": _unpin,
}
