"""Scenario of a seed: the size of the cluster, its settings, its requests, its faults and an attack; and the invariants
that must always hold.

Cheap checks run after every event, deep ones every `EVENTS_PER_DEEP_CHECK` events and at the end. A client's output is
checked in `client.py`, a router's actions in `audit.py` (`cluster/simulate/actors/`).
"""

import random
from dataclasses import dataclass, replace
from typing import Final

from holdfast.cluster.simulate.actors.client import PlannedRequest
from holdfast.cluster.simulate.actors.replica import SimulatedReplica
from holdfast.cluster.simulate.actors.replica_link import ReplicaShape
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.kernel.timeline import Violation, require
from holdfast.cluster.simulate.oracle.pseudo_model import EOS_TOKEN_ID, VOCAB_SIZE
from holdfast.cluster.simulate.oracle.pseudo_runner import PROPOSERS, PseudoRunner
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
from holdfast.cluster.simulate.world.traffic import draw_requests, draw_sessions, draw_storm, with_pins
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.model_info import TILE_TOKENS, Window, sequence_blocks
from holdfast.worker.scheduler.step_time import StepCosts


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
    replica = _draw_shape(rng, async_scheduling)
    if not async_scheduling:  # states are on CPUs, where steps are planned in turn
        slots = random.Random(f"states {seed}").choice((0, 0, 2, replica.scheduler.max_num_seqs, 64))
        replica = replace(replica, num_state_slots=slots)
        replica = _with_one_memory(random.Random(f"one memory {seed}"), replica)
    attack_rng = random.Random(f"attack {seed}")
    limits = LimitsConfig(max_queued=random.Random(f"limits {seed}").choice((4, 1024, 1024, 1024)))
    attack = draw_attack(attack_rng, seed, span_s, num_routers, limits)
    is_quiet = attack is not None and attack_rng.random() < 0.6
    has_disk = not async_scheduling and replica.prefix_caching and random.Random(f"disk {seed}").random() < 0.4
    if not (async_scheduling or has_disk or replica.num_state_slots):  # windows neither
        # drawn so that the seeds that find planted bugs keep their worlds
        replica = _with_window(random.Random(f"window2182 {seed}"), replica)
    has_transfers = not async_scheduling and replica.prefix_caching and num_replicas > 1 and replica.window is None
    has_transfers = has_transfers and random.Random(f"transfers {seed}").random() < 0.6
    are_plain = random.Random(f"plain {seed}").random() < 0.25
    scenario = Scenario(
        seed=seed,
        num_routers=num_routers,
        num_replicas=num_replicas,
        latency_s=rng.choice((0.0002, 0.002, 0.02)),
        router=_draw_router(rng, seed, has_transfers=has_transfers),
        limits=limits,
        replica=replica,
        proposers=rng.choices((None, *PROPOSERS), weights=(3, 1, 1, 1), k=num_replicas),
        requests=[
            *with_pins(
                random.Random(f"pins {seed}"),
                draw_requests(
                    rng,
                    rng.randint(60, 160),
                    span_s,
                    replica.max_model_len,
                    are_plain=are_plain,
                    before=2 * TILE_TOKENS if replica.window else 0,
                ),
            ),
            *draw_sessions(random.Random(f"sessions {seed}"), span_s, replica.max_model_len),
            *draw_storm(random.Random(f"storm {seed}"), span_s),
        ],
        faults=[
            *draw_faults(rng, span_s, num_routers, num_replicas),
            *draw_updates(random.Random(f"update {seed}"), span_s, num_replicas),
            *draw_host_losses(random.Random(f"host {seed}"), span_s, num_replicas),
        ],
        has_disk=has_disk,
        # these numbers too were drawn so that the seeds that find planted bugs keep their worlds
        max_disk_rows=_draw_max_disk_rows(random.Random(f"disk size323 {seed}")),
        has_transfers=has_transfers,
        attack=attack,
    )
    if has_disk:
        scenario.faults.extend(draw_store_faults(random.Random(f"disk faults {seed}"), span_s, DISK_KINDS))
    if has_transfers:
        scenario.faults.extend(draw_store_faults(random.Random(f"transfer faults {seed}"), span_s, TRANSFER_KINDS))
    if any(planned.request.cache_ttl_s or planned.request.cache_marks for planned in scenario.requests):
        unpin_rng = random.Random(f"unpin95337 {seed}")
        if unpin_rng.random() < 0.5:
            scenario.faults.extend(draw_store_faults(unpin_rng, span_s, PIN_KINDS, num_replicas))
    scenario.faults.sort(key=lambda fault: fault.time_s)
    return _without_trouble(scenario) if is_quiet else scenario


def _draw_max_disk_rows(rng: random.Random) -> int:
    return 1_000_000 if rng.random() < 0.4 else rng.choice((12, 60))


def _draw_router(rng: random.Random, seed: int, *, has_transfers: bool) -> RouterConfig:
    return RouterConfig(
        routing_policy=rng.choice(("prefix_aware", "prefix_aware", "power_of_two")),
        max_waiting_per_replica=rng.choice((1, 2, 8, 64)),
        replica_wait_s=rng.choice((5.0, 30.0)),
        max_ttft_s=random.Random(f"ttft {seed}").choice((*(None,) * 6, 1.0, 5.0)),
        prefill_replicas=random.Random(f"prefill {seed}").choice((0, 0, 1, 2)) if has_transfers else 0,
        decode_replicas=random.Random(f"decode {seed}").choice((0, 1)) if has_transfers else 0,
        prefill_tokens=random.Random(f"long {seed}").choice((1, 8, None)),
    )


def _without_trouble(scenario: Scenario) -> Scenario:
    """The same without faults and poison: whatever goes wrong comes of the attack."""
    requests = [planned for planned in scenario.requests if not planned.is_poison]
    return replace(scenario, faults=[], requests=requests)


def _draw_shape(rng: random.Random, async_scheduling: bool) -> ReplicaShape:
    block_size = rng.choice((1, 2, 4, 8))
    max_model_len = rng.choice((32, 48))
    max_num_seqs = rng.choice((2, 8, 16, 32))
    # Sizes from a cache that a single sequence can fill to a cache with room for all.
    num_slots = max_model_len * rng.choice((1, 2, 4, max_num_seqs))
    return ReplicaShape(
        scheduler=SchedulerConfig(
            max_num_batched_tokens=rng.choice((4, 16, 64, 256)),
            max_num_seqs=max_num_seqs,
            max_num_waiting=rng.choice((4, 1024, 1024, 1024)),
            tenant_shares=rng.choice(({}, {"gold": 4.0})),
            async_scheduling=async_scheduling,
        ),
        num_blocks=-(-num_slots // block_size),
        block_size=block_size,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        vocab_size=VOCAB_SIZE,
        prefix_caching=rng.random() < 0.8,
        step_costs=StepCosts(
            base_s=rng.uniform(0.005, 0.05), decode_s=0.0, token_s=rng.choice((0.0, 0.0002)), context_token_s=0.0
        ),
        make_runner=PseudoRunner,
        num_drafts=rng.choice((1, 2, 4, 8)),
    )


def _with_one_memory(rng: random.Random, shape: ReplicaShape) -> ReplicaShape:
    """The states of most models that keep some lie in the place of blocks."""
    if not shape.num_state_slots or rng.random() > 2 / 3:
        return shape
    state_blocks = rng.choice((1, 3))
    num_blocks = shape.num_blocks + rng.choice((1, 2, 8)) * state_blocks
    return replace(shape, num_blocks=num_blocks, num_state_slots=num_blocks // state_blocks, state_blocks=state_blocks)


def _with_window(rng: random.Random, shape: ReplicaShape) -> ReplicaShape:
    """Most get a window, and sequences that leave it behind."""
    if rng.random() > 2 / 3:
        return shape
    window = Window.beside(shape.block_size, rng.choice((3, 8, 20)), rng.choice((1, 2)) * shape.block_size)
    length = 2 * TILE_TOKENS + 48
    num_blocks = sequence_blocks(length, shape.block_size, window) * rng.choice((1, 2, 4, shape.scheduler.max_num_seqs))
    scheduler = shape.scheduler.model_copy(update={"max_num_batched_tokens": rng.choice((64, 256))})
    return replace(shape, scheduler=scheduler, window=window, max_model_len=length, num_blocks=num_blocks)


EVENTS_PER_DEEP_CHECK: Final = 400  # simulated events


class Checks:
    """The invariants of a simulated cluster."""

    def __init__(self, routers: list[SimulatedRouter], replicas: list[SimulatedReplica]) -> None:
        self._routers = routers
        self._replicas = replicas
        self._num_events = 0

    def after_event(self) -> None:
        """Checks the limits of queues, and now and then everything. Raises Violation."""
        for replica in self._replicas:
            if replica.is_up and replica.core.load.num_waiting > replica.max_num_waiting:
                raise Violation(
                    f"{replica}: {replica.core.load.num_waiting} wait, and only {replica.max_num_waiting} may"
                )
        self._num_events += 1
        if self._num_events % EVENTS_PER_DEEP_CHECK == 0:
            self.deep()

    def deep(self) -> None:
        """Checks that the records of every process are consistent."""
        for process in (*self._routers, *self._replicas):
            if process.is_up:
                process.check_integrity()

    def at_end(self) -> None:
        """Checks, once all is answered and healed, that nothing is left anywhere."""
        self.deep()
        for router in self._routers:
            require(router.is_up and not router.is_frozen, f"{router} did not come back")
            num_open = router.dispatch_host.dispatch.num_open
            require(num_open == 0, f"{router}: {num_open} records leaked")
            num_withdrawn = router.dispatch_host.dispatch.num_withdrawn
            require(num_withdrawn == 0, f"{router}: {num_withdrawn} withdrawn attempts were never reported as ended")
            require(router.num_links_up == len(self._replicas), f"{router}: {router.num_links_up} links are up")
        for replica in self._replicas:
            require(replica.is_up and not replica.is_frozen, f"{replica} did not come back")
            stats = replica.core.scheduler.stats()
            num_alive = stats.num_running + stats.num_waiting
            require(num_alive == 0, f"{replica}: {num_alive} attempts run without a request")
            require(replica.num_unanswered == 0, f"{replica}: {replica.num_unanswered} attempts were never answered")
            require(stats.num_used_blocks == 0, f"{replica}: {stats.num_used_blocks} blocks leaked")
            replica.core.scheduler.pinning.end(replica.clock)
            num_pinned = replica.core.scheduler.stats().num_pinned_blocks
            require(num_pinned == 0, f"{replica}: {num_pinned} blocks are pinned, and no request asks for that now")
