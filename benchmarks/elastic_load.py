"""Loads whose rate changes, and their simulation on the real router and schedulers while an autoscaler changes the
replicas.

Replicas take time to start, and leave by draining, as in a cluster.
"""

import bisect
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from holdfast.cluster.load_trace import Arrival
from holdfast.cluster.scaling.autoscaler import Decision, Seen
from holdfast.cluster.simulate.actors.replica import MODEL, SimulatedReplica
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.capacity.capacity import (
    LATENCY_S,
    ClusterShape,
    MeteredClient,
    NoText,
    Service,
    replica_shape,
)
from holdfast.cluster.simulate.kernel.network import Network
from holdfast.cluster.simulate.kernel.timeline import Timeline
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.demand import ModelDemand

LOOK_EVERY_S: Final = 1.0
BEGIN_S: Final = 1.0


class Policy(Protocol):
    """Who decides the number of replicas, once every `LOOK_EVERY_S`."""

    def decide(self, seen: Seen) -> Decision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticResult:
    """What a load got, and what it took."""

    services: list[Service]
    replica_s: float
    """Seconds of all replicas, from the decision for each until it had ended."""
    changes: list[tuple[float, int, str]]
    """Every change of the number that was wanted: when, to how many, and why."""

    def num_missed(self, slo_ttft_s: float) -> int:
        """Requests without a first token by then, and requests that were not served to the end."""
        return sum(one.ttft_s is None or one.ttft_s > slo_ttft_s for one in self.services)

    @property
    def num_lost(self) -> int:
        """Requests that were not served to the end."""
        return sum(one.ttft_s is None for one in self.services)


class ElasticCluster:
    """Replicas of one router that come and go."""

    def __init__(
        self, shape: ClusterShape, policy: Policy, startup_s: float, seed: int, cold_start_wait_s: float
    ) -> None:
        rng = random.Random(seed)
        self.timeline = Timeline()
        self.network = Network(self.timeline, rng, LATENCY_S)
        self._shape = replica_shape(shape)
        self._policy = policy
        self._startup_s = startup_s
        self._cold_start_wait_s = cold_start_wait_s
        self.router = SimulatedRouter(
            "router",
            self.network,
            [],
            RouterConfig(routing_policy="power_of_two"),
            LimitsConfig(max_queued=100_000),
            make_text=lambda request: NoText(),
            seed=rng.getrandbits(32),
            order=shape.scheduler,
        )
        self._starting: list[SimulatedReplica] = []
        self._serving: list[SimulatedReplica] = []
        self._leaving: list[SimulatedReplica] = []
        self._num_made = 0
        self.replica_s = 0.0
        self.changes: list[tuple[float, int, str]] = []

    def begin(self, num_replicas: int) -> None:
        """So many replicas serve from the beginning on."""
        self.router.start()
        self.router.dispatch_host.models_asleep({MODEL: self._cold_start_wait_s})
        for _ in range(num_replicas):
            self._starting.append(self._new())
            self._serve(self._starting[-1])
        self.timeline.after(LOOK_EVERY_S, self._look)

    @property
    def num_wanted(self) -> int:
        return len(self._starting) + len(self._serving)

    def _look(self) -> None:
        self.replica_s += LOOK_EVERY_S * (self.num_wanted + len(self._leaving))
        self._end_drained()
        seen = Seen(now_s=self.timeline.now, num_wanted=self.num_wanted, demand=self._demand())
        decision = self._policy.decide(seen)
        if decision.num_replicas != self.num_wanted:
            self.changes.append((self.timeline.now, decision.num_replicas, decision.reason))
        while self.num_wanted < decision.num_replicas:
            self._order()
        while self.num_wanted > decision.num_replicas:
            self._dismiss()
        self.timeline.after(LOOK_EVERY_S, self._look)

    def _demand(self) -> ModelDemand:
        return next(iter(self.router.dispatch_host.demands()), ModelDemand(model=MODEL))

    def _new(self) -> SimulatedReplica:
        self._num_made += 1
        return SimulatedReplica(f"replica-{self._num_made}", self.network, self._shape)

    def _order(self) -> None:
        replica = self._new()
        self._starting.append(replica)
        self.timeline.after(self._startup_s, self._serve, replica)

    def _serve(self, replica: SimulatedReplica) -> None:
        if replica in self._starting:
            self._starting.remove(replica)
            self._serving.append(replica)
            replica.start()
            self.router.join(replica)

    def _dismiss(self) -> None:
        """The newest goes, as in Serve: one that still starts, before one that has to drain."""
        if self._starting:
            self._starting.pop()
            return
        replica = self._serving.pop()
        self._leaving.append(replica)
        replica.retire(True)

    def _end_drained(self) -> None:
        for replica in list(self._leaving):
            if not replica.num_unanswered:
                self._leaving.remove(replica)
                self.router.remove_replica(replica)
                replica.kill()


def serve_elastic(
    trace: Sequence[Arrival],
    shape: ClusterShape,
    policy: Policy,
    *,
    startup_s: float,
    cold_start_wait_s: float = 120.0,
    tail_s: float = 0.0,
    seed: int = 0,
) -> ElasticResult:
    """Serves a load with `shape.num_replicas` replicas at first. Time goes on for `tail_s` after the last token."""
    cluster = ElasticCluster(shape, policy, startup_s, seed, cold_start_wait_s)
    timeline = cluster.timeline
    timeline.at(0.0, cluster.begin, shape.num_replicas)
    clients = [MeteredClient(number, arrival, cluster.network, cluster.router) for number, arrival in enumerate(trace)]
    for client, arrival in zip(clients, trace, strict=True):
        timeline.at(BEGIN_S + arrival.arrival_s, client.begin)
    left = list(reversed(clients))
    while left and timeline.step():
        while left and left[-1].is_over:
            left.pop()
    end_s = timeline.now + tail_s
    while timeline.next_s <= end_s:
        timeline.step()
    return ElasticResult(
        services=[client.service() for client in clients],
        replica_s=cluster.replica_s,
        changes=cluster.changes,
    )


Rate = Callable[[float], float]
"""Requests a second at a time, in seconds from the beginning."""


def arrivals(
    rate: Rate, highest: float, duration_s: float, mean_prompt: int, mean_output: int, seed: int
) -> list[Arrival]:
    """Requests at a rate that is never above `highest`. Lengths are uniform, from half the mean to one and a half."""
    rng = random.Random(seed)
    found, now_s = list[Arrival](), 0.0
    while (now_s := now_s + rng.expovariate(highest)) < duration_s:
        if rng.random() * highest < rate(now_s):
            found.append(
                Arrival(
                    arrival_s=now_s,
                    num_prompt_tokens=rng.randint(mean_prompt // 2, mean_prompt * 3 // 2),
                    num_output_tokens=rng.randint(mean_output // 2, mean_output * 3 // 2),
                )
            )
    return found


def burst(low: float, high: float, from_s: float, to_s: float) -> Rate:
    """`low`, but for a time with `high`."""
    return lambda now_s: high if from_s <= now_s < to_s else low


def ramp(low: float, high: float, duration_s: float) -> Rate:
    """From `low` to `high` in the first half, and back."""
    half_s = duration_s / 2
    return lambda now_s: low + (high - low) * (1 - abs(now_s - half_s) / half_s)


def day(low: float, high: float, period_s: float) -> Rate:
    """A sine between `low`, at the beginning, and `high`."""
    return lambda now_s: low + (high - low) * (1 - math.cos(2 * math.pi * now_s / period_s)) / 2


def spells(low: float, high: float, mean_s: float, duration_s: float, seed: int) -> Rate:
    """Quiet and busy spells in turn, of exponential lengths, as recorded traffic has them."""
    rng = random.Random(seed)
    ends, now_s = list[float](), 0.0
    while now_s < duration_s:
        now_s += rng.expovariate(1 / mean_s)
        ends.append(now_s)
    return lambda now_s: (low, high)[bisect.bisect_right(ends, now_s) % 2]
