"""Scenario of a seed: the size of the cluster, its settings, its requests, its faults and an attack."""

import random
from dataclasses import dataclass, replace

from holdfast.cluster.simulate.actors.client import PlannedRequest
from holdfast.cluster.simulate.actors.replica_link import ReplicaShape
from holdfast.cluster.simulate.oracle.pseudo_runner import PROPOSERS
from holdfast.cluster.simulate.world.attacks import Attack, draw_attack
from holdfast.cluster.simulate.world.faults import (
    DISK_KINDS,
    PIN_KINDS,
    TRANSFER_KINDS,
    SimulatedFault,
    draw_faults,
    draw_host_losses,
    draw_store_faults,
    draw_updates,
)
from holdfast.cluster.simulate.world.part_rng import part_rng
from holdfast.cluster.simulate.world.shapes import draw_shape, with_window
from holdfast.cluster.simulate.world.traffic import draw_requests, draw_sessions, draw_storm, with_pins
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.worker.model_info import TILE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulation, drawn and not yet run."""

    seed: int
    num_routers: int
    num_replicas: int
    latency_s: float
    """Mean latency of a message on a good day, in seconds."""
    router: RouterConfig
    limits: LimitsConfig
    replica: ReplicaShape
    """Shape of all replicas."""
    proposers: list[str | None]
    """The draft proposer of each replica (`cluster/simulate/oracle/pseudo_runner.py`); None: no drafts."""
    requests: list[PlannedRequest]
    faults: list[SimulatedFault]
    has_disk: bool
    """Replicas have a block store below their caches, all of them one."""
    max_disk_rows: int
    """Blocks and states that fit on the disk."""
    has_transfers: bool
    """Blocks go from one replica to another."""
    attack: Attack | None
    """Requests of a class that costs routers much; None: only ordinary ones come."""

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong in it, whatever is asked."""
        return not self.faults and not any(planned.is_poison for planned in self.requests)


def draw_scenario(seed: int, *, async_scheduling: bool = False) -> Scenario:
    """The scenario of a seed: always the same one, with one plan in flight or with two."""
    rng = random.Random(seed)
    num_routers, num_replicas = rng.randint(1, 3), rng.randint(1, 4)
    span_s = rng.uniform(1.0, 5.0)
    replica = draw_shape(rng, seed, async_scheduling=async_scheduling)
    has_disk = _draw_has_disk(seed, replica)
    replica = replica if has_disk else with_window(seed, replica)  # windows are not on the disk
    has_transfers = _draw_has_transfers(seed, replica, num_replicas)
    limits = LimitsConfig(max_queued=part_rng("limits", seed).choice((4, 1024, 1024, 1024)))
    attack, is_quiet = _draw_attack(seed, span_s, num_routers, limits)
    scenario = Scenario(
        seed=seed,
        num_routers=num_routers,
        num_replicas=num_replicas,
        latency_s=rng.choice((0.0002, 0.002, 0.02)),
        router=_draw_router(rng, seed, has_transfers=has_transfers),
        limits=limits,
        replica=replica,
        proposers=rng.choices((None, *PROPOSERS), weights=(3, 1, 1, 1), k=num_replicas),
        requests=_draw_requests(rng, seed, span_s, replica),
        faults=_draw_faults(rng, seed, span_s, num_routers, num_replicas),
        has_disk=has_disk,
        max_disk_rows=_draw_max_disk_rows(seed),
        has_transfers=has_transfers,
        attack=attack,
    )
    return _without_trouble(scenario) if is_quiet else _with_store_faults(scenario, span_s)


def _draw_has_disk(seed: int, replica: ReplicaShape) -> bool:
    can_have = replica.prefix_caching and not replica.scheduler.async_scheduling
    return can_have and part_rng("disk", seed).random() < 0.4


def _draw_has_transfers(seed: int, replica: ReplicaShape, num_replicas: int) -> bool:
    can_have = replica.prefix_caching and not replica.scheduler.async_scheduling and replica.window is None
    return can_have and num_replicas > 1 and part_rng("transfers", seed).random() < 0.6


def _draw_max_disk_rows(seed: int) -> int:
    rng = part_rng("disk size", seed)
    return 1_000_000 if rng.random() < 0.4 else rng.choice((12, 60))


def _draw_attack(seed: int, span_s: float, num_routers: int, limits: LimitsConfig) -> tuple[Attack | None, bool]:
    """The attack, and whether nothing else goes wrong."""
    rng = part_rng("attack", seed)
    attack = draw_attack(rng, seed, span_s, num_routers, limits)
    return attack, attack is not None and rng.random() < 0.6


def _draw_requests(rng: random.Random, seed: int, span_s: float, replica: ReplicaShape) -> list[PlannedRequest]:
    """Independent requests, some of them pinned; sessions; a storm of long prompts."""
    are_plain = part_rng("plain", seed).random() < 0.25
    before = 2 * TILE_TOKENS if replica.window else 0
    number, length = rng.randint(60, 160), replica.max_model_len
    requests = draw_requests(rng, number, span_s, length, are_plain=are_plain, before=before)
    return [
        *with_pins(part_rng("pins", seed), requests),
        *draw_sessions(part_rng("sessions", seed), span_s, length),
        *draw_storm(part_rng("storm", seed), span_s),
    ]


def _draw_faults(
    rng: random.Random, seed: int, span_s: float, num_routers: int, num_replicas: int
) -> list[SimulatedFault]:
    """Faults of processes, of the network and of hosts, and updates."""
    return [
        *draw_faults(rng, span_s, num_routers, num_replicas),
        *draw_updates(part_rng("update", seed), span_s, num_replicas),
        *draw_host_losses(part_rng("host", seed), span_s, num_replicas),
    ]


def _draw_router(rng: random.Random, seed: int, *, has_transfers: bool) -> RouterConfig:
    return RouterConfig(
        routing_policy=rng.choice(("prefix_aware", "prefix_aware", "power_of_two")),
        max_waiting_per_replica=rng.choice((1, 2, 8, 64)),
        replica_wait_s=rng.choice((5.0, 30.0)),
        max_ttft_s=part_rng("ttft", seed).choice((*(None,) * 6, 1.0, 5.0)),
        prefill_replicas=part_rng("prefill", seed).choice((0, 0, 1, 2)) if has_transfers else 0,
        max_prefill_replicas=part_rng("most prefill", seed).choice((None, 2, 3)) if has_transfers else None,
        decode_replicas=part_rng("decode", seed).choice((0, 1)) if has_transfers else 0,
        prefill_tokens=part_rng("long", seed).choice((1, 8, None)),
    )


def _with_store_faults(scenario: Scenario, span_s: float) -> Scenario:
    """The same with the faults of what it has: a disk, transfers of blocks, pins. All faults in the order of time."""
    seed, faults = scenario.seed, list(scenario.faults)
    if scenario.has_disk:
        faults += draw_store_faults(part_rng("disk faults", seed), span_s, DISK_KINDS)
    if scenario.has_transfers:
        faults += draw_store_faults(part_rng("transfer faults", seed), span_s, TRANSFER_KINDS)
    unpin_rng = part_rng("unpin", seed)
    has_pins = any(planned.request.cache_ttl_s or planned.request.cache_marks for planned in scenario.requests)
    if has_pins and unpin_rng.random() < 0.5:
        faults += draw_store_faults(unpin_rng, span_s, PIN_KINDS, scenario.num_replicas)
    return replace(scenario, faults=sorted(faults, key=lambda fault: fault.time_s))


def _without_trouble(scenario: Scenario) -> Scenario:
    """The same without faults and poison: whatever goes wrong comes of the attack."""
    requests = [planned for planned in scenario.requests if not planned.is_poison]
    return replace(scenario, faults=[], requests=requests)
