"""One simulation: a cluster is built from a scenario, goes through its faults, and is checked after every event.

The seed alone decides: no clock, socket, thread or hash of a string.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from holdfast.cluster.simulate.actors.attacker import Attacker
from holdfast.cluster.simulate.actors.client import PATIENCE_S, SimulatedClient
from holdfast.cluster.simulate.actors.costly_message import Decoder, LoopCosts
from holdfast.cluster.simulate.actors.disk import JournalFolder, SimulatedDisk
from holdfast.cluster.simulate.actors.replica import MODEL, SimulatedReplica
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.actors.router_apis import ApiSettings
from holdfast.cluster.simulate.actors.transfers import SimulatedTransfers
from holdfast.cluster.simulate.kernel.network import KEEPALIVE_S, Network
from holdfast.cluster.simulate.kernel.timeline import Event, Timeline, Violation, require
from holdfast.cluster.simulate.oracle.pseudo_model import pseudo_tokenizer
from holdfast.cluster.simulate.oracle.pseudo_runner import PROPOSERS
from holdfast.cluster.simulate.world.attacks import (
    ENDS,
    SPREAD_S,
    check_decoding,
    check_ended,
    check_pauses,
    check_resets,
)
from holdfast.cluster.simulate.world.checks import Checks
from holdfast.cluster.simulate.world.faults import HOST_LOSS, UPDATE, SimulatedFault, slowness, strike
from holdfast.cluster.simulate.world.part_rng import part_rng
from holdfast.cluster.simulate.world.scenario import Scenario, draw_scenario
from holdfast.cluster.simulate.world.traffic import LONGEST_S
from holdfast.router.config import OverloadConfig
from holdfast.router.operator_state import OperatorState
from holdfast.router.text.text_stream import TextStream
from holdfast.router.wire.bounds import generation_bounds
from holdfast.worker.config import HealthConfig
from holdfast.worker.scheduler.step_time import StepShape

LOSSES: Final = frozenset(
    {"kill replica", "freeze replica", "drain replica", "cut link", "partition link", "freeze router"}
)
"""Faults that take one replica from a router, so that what ran there may be suspected."""
REPLICAS_PER_HOST: Final = 2  # replicas
ROUTER_LOSSES: Final = frozenset({"kill router", "freeze router", "drain router", "cut calls"})
"""Faults by which a router ends, or seems to, while it reads requests, so that these may be suspected."""
ANSWER_S: Final = PATIENCE_S + 10.0
"""Every client has an answer within this many seconds after the end of the last fault and the arrival of the last
request.
"""
MAX_EVENTS: Final = 200_000
"""Many times what any simulation needs: beyond it, processes are in a livelock."""
COSTS: Final = LoopCosts()
"""Costs of every router and replica."""
MAX_LAG_S: Final = 0.05
"""Longest time that a router's event loop lets the reader of a call wait."""
SETTLE_S: Final = 2 * KEEPALIVE_S + 5.0
"""After this many more seconds, no state of any request is left."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one simulation, or of several together."""

    num_simulations: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    """Received by clients."""
    num_sampled_tokens: int = 0
    """Tokens sampled by replicas. More than `num_tokens`: some were lost on the way, or sampled again elsewhere."""
    num_steps: int = 0
    num_ahead: int = 0
    """Steps that were planned before the result of the step before them."""
    num_events: int = 0
    num_reconnects: int = 0
    """Number of calls that clients resumed at the next router."""
    num_stragglers: int = 0
    """Calls that came to a router late, or never."""
    num_turned_away: int = 0
    """Calls that ended because a newer call of the same request had arrived."""
    num_condemned: int = 0
    num_restarted: int = 0
    """Requests that clients sent again from the beginning, because an update had removed their version."""
    num_poisoned: int = 0
    num_hung: int = 0
    """Routers that their hang supervisors killed."""
    num_crashed: int = 0
    """Routers that ended while they read a request of an attack."""
    num_falsely_quarantined: int = 0
    """Quarantined requests that are not poisonous."""
    simulated_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    attacks: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A broken promise of a simulation, and where it was found."""

    seed: int
    event: int
    time_s: float
    error: Exception

    def __str__(self) -> str:
        kind = "" if isinstance(self.error, Violation) else f"{type(self.error).__name__}: "
        return f"seed {self.seed}, event {self.event}, at {self.time_s:.6f} s: {kind}{self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of the simulation of one seed."""

    tally: Tally
    failure: Failure | None
    digest: int
    """Two runs of a seed have the same."""


class World:
    """A simulated cluster and its clients."""

    def __init__(self, scenario: Scenario, watch: Callable[[Event], None] | None = None) -> None:
        rng = part_rng("world", scenario.seed)
        self.scenario = scenario
        self.timeline = Timeline(watch)
        self.network = Network(self.timeline, rng, scenario.latency_s)
        self.disk = None
        if scenario.has_disk:
            disk_rng = part_rng("disk", scenario.seed)
            self.disk = SimulatedDisk(disk_rng, lambda: self.timeline.now, scenario.max_disk_rows)
        self.transfers = None
        if scenario.has_transfers:
            self.transfers = SimulatedTransfers(part_rng("transfers", scenario.seed), self.timeline.after)
        self.replicas = [
            SimulatedReplica(
                f"replica-{i}",
                self.network,
                replace(scenario.replica, make_proposer=PROPOSERS[name] if name else None),
                COSTS,
                self.disk,
                self.transfers,
                host=f"host-{i // REPLICAS_PER_HOST}",
            )
            for i, name in enumerate(scenario.proposers)
        ]
        apis = ApiSettings(
            costs=COSTS,
            limits=scenario.limits,
            router=scenario.router,
            overload=OverloadConfig(),
            decoder=Decoder(generation_bounds(scenario.limits), COSTS),
            journals=JournalFolder(),
        )
        tokenizer = pseudo_tokenizer()
        self.routers = [
            SimulatedRouter(
                f"router-{i}",
                self.network,
                self.replicas,
                scenario.router,
                scenario.limits,
                make_text=lambda request: TextStream(tokenizer, request.sampling_params, request.prompt_token_ids),
                seed=rng.getrandbits(32),
                order=scenario.replica.scheduler,
                max_lag_s=MAX_LAG_S,
                apis=apis,
                hangs_after_s=HealthConfig().hangs_after_s,
            )
            for i in range(scenario.num_routers)
        ]
        max_model_len = scenario.replica.max_model_len
        self.clients = [
            SimulatedClient(planned, self.network, self.routers, rng, max_model_len) for planned in scenario.requests
        ]
        for client in self.clients:
            client.hopeless_s = self._prefill_s(len(client.planned.request.prompt_token_ids))
        attack = scenario.attack
        self.attackers: list[Attacker] = [] if attack is None else attack.attackers(self.network, self.routers)
        self._attack_s = self._attack_end_s = 0.0 if attack is None else attack.time_s
        self._revision = 0
        self._checks = Checks(self.routers, self.replicas)

    def run(self) -> None:
        """Raises `Violation`, or whatever went wrong in the code that was simulated."""
        for process in (*self.replicas, *self.routers):
            self.timeline.at(0.0, process.start)
        for client in self.clients:
            self.timeline.at(client.planned.arrival_s, client.begin)
        for fault in self.scenario.faults:
            self.timeline.at(fault.time_s, self.strike, fault)
        for number, attacker in enumerate(self.attackers):
            spread_s = SPREAD_S * number / len(self.attackers)
            self.timeline.at(self._attack_s + spread_s, attacker.begin)
        healed_s = self._healed_s()
        self._run_until(healed_s + ANSWER_S, self._is_all_answered)
        for client in self.clients:
            require(client.outcome is not None, f"{client} was not answered within {ANSWER_S:g} s after all was well")
        self._run_until(max(healed_s, self.timeline.now) + SETTLE_S)
        self._checks.at_end()
        self._check_poison()
        self._check_calm()
        self._check_attack()

    def _is_all_answered(self) -> bool:
        is_attack_over = all(attacker.is_over for attacker in self.attackers)
        if not is_attack_over:
            self._attack_end_s = self.timeline.now
        return is_attack_over and all(client.outcome for client in self.clients)

    def strike(self, fault: SimulatedFault) -> None:
        strike(self, fault)

    def note_clock_jump(self, seconds: float) -> None:
        for client in self.clients:
            client.clock_error_s += abs(seconds)

    def retire_versions(self) -> None:
        """Retires all versions of an ended update except the versions that replicas run, or will run when they
        return.
        """
        wanted = {replica.version_of(replica.next_release) for replica in self.replicas}
        known = {replica.version_of(fault.release) for replica in self.replicas for fault in self.scenario.faults}
        self._revision += 1
        retired = frozenset((MODEL, version) for version in known - wanted)
        for router in self.routers:
            router.order(OperatorState(revision=self._revision, retired=retired))

    def __str__(self) -> str:
        return "fault:"

    def tally(self) -> Tally:
        """Counts of this simulation, to be added to those of others."""
        stragglers = [straggler for client in self.clients for straggler in client.stragglers]
        return Tally(
            num_simulations=1,
            num_requests=len(self.clients),
            num_tokens=sum(client.num_tokens for client in self.clients),
            num_sampled_tokens=sum(replica.num_tokens for replica in self.replicas),
            num_steps=sum(replica.num_steps for replica in self.replicas),
            num_ahead=sum(replica.num_ahead for replica in self.replicas),
            num_events=self.timeline.num_events,
            num_reconnects=sum(max(0, client.num_connections - 1) for client in self.clients),
            num_stragglers=len(stragglers),
            num_turned_away=sum(straggler.was_turned_away for straggler in stragglers),
            num_condemned=sum(replica.num_condemned for replica in self.replicas),
            num_restarted=sum(client.num_restarted for client in self.clients),
            num_poisoned=sum(replica.num_poisoned for replica in self.replicas),
            num_falsely_quarantined=sum(client.is_falsely_quarantined for client in self.clients),
            num_hung=sum(router.num_hung for router in self.routers),
            num_crashed=sum(router.num_crashed for router in self.routers),
            simulated_s=self.timeline.now,
            outcomes=Counter(str(client.outcome) for client in self.clients),
            faults=Counter(fault.kind for fault in self.scenario.faults),
            attacks=Counter([] if self.scenario.attack is None else [self.scenario.attack.kind]),
        )

    def _run_until(self, time_s: float, is_enough: Callable[[], bool] = lambda: False) -> None:
        timeline, after_event = self.timeline, self._checks.after_event
        while timeline.next_s <= time_s and timeline.step():
            after_event()
            require(timeline.num_events < MAX_EVENTS, f"the simulation did not end within {MAX_EVENTS:,} events")
            if timeline.num_events % 64 == 0 and is_enough():
                return

    def _check_poison(self) -> None:
        """Checks that a poisonous request crashes at most `max_replicas_lost` + 1 replicas per router that it reached.

        No other request may be quarantined if there is one poisonous request, it keeps its router, and no fault takes
        replicas or routers; nor if one host is lost and nothing else takes replicas or routers.
        """
        num_killed = sum(replica.num_poisoned for replica in self.replicas)
        num_sent = sum(client.num_connections for client in self.clients if client.planned.is_poison)
        # The crash of a draining replica, or of one that a router had already lost, does not count against a request.
        faults = Counter(fault.kind for fault in self.scenario.faults)
        num_other_losses = faults[UPDATE] * len(self.replicas) + sum(faults[kind] for kind in LOSSES)
        num_losses = num_other_losses + faults[HOST_LOSS] * REPLICAS_PER_HOST
        most = (self.scenario.router.max_replicas_lost + 1) * num_sent + num_losses
        require(num_killed <= most, f"poisonous requests crashed {num_killed} replicas, more than the bound of {most}")
        num_poisons = sum(client.planned.is_poison for client in self.clients)
        loses_routers = self.scenario.attack is not None or any(faults[kind] for kind in ROUTER_LOSSES)
        has_one_cause = (num_poisons, num_sent, num_losses) == (1, 1, 0)
        has_one_cause |= (num_poisons, num_other_losses, faults[HOST_LOSS]) == (0, 0, 1)
        is_plain = has_one_cause and not loses_routers
        for client in self.clients:
            is_wrong = is_plain and client.is_falsely_quarantined
            require(not is_wrong, f"{client} was quarantined although it is not poisonous")

    def _check_calm(self) -> None:
        """Checks that without faults no router loses a replica, and that no storm makes other requests expire."""
        if not self.scenario.is_calm:
            return
        for router in self.routers:
            num_lost = router.dispatch_host.num_replicas_lost
            require(num_lost == 0, f"{router} lost {num_lost} replicas without a fault")
        for client in self.clients:
            is_patient = client.planned.timeout_s == LONGEST_S
            require(
                not is_patient or client.outcome != "expired", f"{client} expired although it had the longest timeout"
            )
            ends_routers = self.scenario.attack is not None and self.scenario.attack.kind in ENDS
            is_reported = (
                ends_routers or client.outcome != "expired" or client.is_notified or not client.planned.grace_s
            )
            require(
                is_reported,
                f"{client} listened for {client.planned.grace_s:g} s, and got no deadline error",
            )

    def _check_attack(self) -> None:
        """Checks the result of an attack in a simulation without other faults."""
        attack = self.scenario.attack
        if attack is not None and self.scenario.is_calm:
            for router in self.routers:
                router.count()
            check_ended(attack, self.routers)
            check_resets(attack, self.routers, self.scenario.limits, self._attack_end_s)
            check_decoding(attack, self.routers)
            check_pauses(attack, self.attackers, self.routers, self._attack_end_s)

    def _prefill_s(self, num_tokens: int) -> float:
        """Seconds of a prompt in full steps of a replica that is as slow as any gets."""
        shape, faults = self.scenario.replica, self.scenario.faults
        slowest = max((slowness(fault) for fault in faults if fault.kind == "slow replica"), default=1.0)
        budget = shape.scheduler.max_num_batched_tokens
        full_step = StepShape(num_decodes=0, num_tokens=budget, num_context_tokens=0)
        return slowest * shape.step_costs.predict(full_step) * num_tokens / budget

    def _healed_s(self) -> float:
        """When the last fault is over and the last request has come."""
        ends = [fault.time_s + fault.duration_s for fault in self.scenario.faults]
        attacked_s = [] if self.scenario.attack is None else [self.scenario.attack.time_s + SPREAD_S]
        return max([*ends, *attacked_s, *(planned.arrival_s for planned in self.scenario.requests)], default=0.0)


def simulate(seed: int, watch: Callable[[Event], None] | None = None, *, async_scheduling: bool = False) -> Outcome:
    """Runs the simulation of a seed to its end, or to the first promise that is broken. With `async_scheduling`, all
    replicas have two plans in flight.
    """
    world = World(draw_scenario(seed, async_scheduling=async_scheduling), watch)
    failure = None
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - whatever the simulated code raises is the outcome
        timeline = world.timeline
        failure = Failure(seed=seed, event=timeline.num_events, time_s=timeline.now, error=error)
    return Outcome(tally=world.tally(), failure=failure, digest=world.timeline.digest)
