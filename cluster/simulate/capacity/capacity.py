"""Capacity simulation: a load on the real router and schedulers in virtual time, without faults and without text."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.cluster.load_trace import Arrival
from holdfast.cluster.simulate.actors.disk import MovingFigures
from holdfast.cluster.simulate.actors.messages import Generate
from holdfast.cluster.simulate.actors.replica import SimulatedReplica
from holdfast.cluster.simulate.actors.replica_link import ReplicaShape
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.actors.transfers import SimulatedTransfers, TransferCosts
from holdfast.cluster.simulate.kernel.network import Connection, Network
from holdfast.cluster.simulate.kernel.timeline import Timeline
from holdfast.router.config import LimitsConfig, PolicyName, RouterConfig
from holdfast.router.generation import OutputDelta
from holdfast.worker.adapter import Adapter
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.step_time import StepCosts
from holdfast.worker.step_plan import StateCopy, StepPlan, StepResult
from holdfast.worker.step_update import EngineStats

LATENCY_S: Final = 0.0005
LONGEST_S: Final = 1e9
COPY_S_PER_BYTE: Final = 1e-10
"""Seconds a byte that sending takes from the steps: a copy out of the cache, and some of the connection's thread."""
BEGIN_S: Final = 1.0
"""When the load begins: by then the links are up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """The cluster that is asked about."""

    num_replicas: int
    step_costs: StepCosts
    scheduler: SchedulerConfig
    num_blocks: int
    block_size: int
    max_model_len: int
    kv_bytes_per_token: int = 0
    """Bytes of a token's keys and values; 0: replicas send each other no blocks."""
    bytes_per_s: float = 1.25e9
    """Speed of a transfer between two replicas."""
    max_loras: int = 0
    """Adapters that are resident in a replica at a time; 0: it serves none."""
    adapter_load_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Service times of one request, in seconds."""

    ttft_s: float | None
    """Seconds from arrival to the first token; None if it was not served to the end."""
    tpot_s: float | None
    """Seconds from the first token to the last, per token after the first; None if there is none after it."""
    pause_s: float = 0.0
    """The longest time between two outputs, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityResult:
    """Results of a load under one routing policy."""

    routing: str
    services: list[Service]
    rate: float
    """Requests a second that were asked for."""
    duration_s: float
    """Seconds from the first arrival to the last token."""
    busy_s: list[float]
    """Seconds that each replica spent in steps."""
    prefix_hit_rate: float
    """Share of the prompts' tokens that replicas had cached."""
    num_adapter_loads: int = 0
    """Adapters that replicas have loaded."""

    @property
    def imbalance(self) -> float:
        """Busy seconds of the busiest replica over those of the mean one: 1 is perfect."""
        mean = sum(self.busy_s) / len(self.busy_s)
        return max(self.busy_s) / mean if mean else 1.0

    def goodput(self, slo_ttft_s: float, slo_tpot_s: float) -> float:
        """Requests a second that kept to both limits."""
        good = [service for service in self.services if _is_good(service, slo_ttft_s, slo_tpot_s)]
        return len(good) / self.duration_s


class NoText:
    """A `TextState` for tokens without a text."""

    text = ""
    stopped = False
    matched: str | None = None

    def __init__(self) -> None:
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> "NoText":
        self.num_tokens = len(token_ids)
        return self

    def push_one(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class AnyTokenRunner:
    """Always draws the same token: the load sets the length of an output."""

    def __init__(self, *shape: object) -> None:
        pass

    def read_block(self, kind: bytes, place: int) -> bytes:
        """Nothing: what blocks hold draws no token."""
        return b""

    def write_block(self, kind: bytes, place: int, content: bytes) -> None:
        """Does nothing."""

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Does nothing."""

    def run(self, plan: StepPlan) -> StepResult:
        drawn = tuple((1,) * sequence.num_draws for sequence in plan.sequences)
        return StepResult(step_id=plan.step_id, token_ids=drawn)


class MeteredClient:
    """One request of the load, and when its tokens came."""

    def __init__(self, number: int, arrival: Arrival, network: Network, router: SimulatedRouter) -> None:
        self._number = number
        self._arrival = arrival
        self._network = network
        self._router = router
        self._num_tokens = 0
        self._began_s = self._first_s = self.last_s = self._pause_s = 0.0
        self.is_over = False

    def begin(self) -> None:
        self._began_s = self._network.timeline.now
        request = EngineRequest(
            request_id=str(self._number),
            prompt_token_ids=self._arrival.prompt_token_ids(self._number),
            sampling_params=SamplingParams(seed=0, ignore_eos=True, max_tokens=self._arrival.num_output_tokens),
            adapter=_adapter(self._arrival.adapter),
        )
        path = self._network.path("clients", self._router.site)
        connection = Connection(self._network, path, (self, self._router))
        connection.send(self, Generate(request=request, resume=None, timeout_s=LONGEST_S))

    def receive(self, connection: Connection, message: Any) -> None:
        if isinstance(message, OutputDelta) and message.token_ids:
            before_s, self.last_s = self.last_s, self._network.timeline.now
            if not self._num_tokens:
                self._first_s = before_s = self.last_s
            self._pause_s = max(self._pause_s, self.last_s - before_s)
            self._num_tokens += len(message.token_ids)

    def closed(self, connection: Connection) -> None:
        self.is_over = True

    def service(self) -> Service:
        if self._num_tokens < self._arrival.num_output_tokens:
            return Service(ttft_s=None, tpot_s=None)
        num_pauses = self._num_tokens - 1
        tpot_s = (self.last_s - self._first_s) / num_pauses if num_pauses else None
        return Service(ttft_s=self._first_s - self._began_s, tpot_s=tpot_s, pause_s=self._pause_s)


def _adapter(number: int | None) -> Adapter | None:
    return None if number is None else Adapter(f"adapter-{number}", f"{number:064x}", "")


def serve(
    trace: Sequence[Arrival],
    shape: ClusterShape,
    routing: PolicyName,
    *,
    seed: int = 0,
    config: RouterConfig | None = None,
    limits: LimitsConfig | None = None,
    on_done: Callable[[int], None] = lambda num: None,
) -> CapacityResult:
    """Serves a load under one routing policy. `on_done` gets the number of ended requests now and then."""
    rng = random.Random(seed)
    timeline = Timeline()
    network = Network(timeline, rng, LATENCY_S)
    transfers = _transfers(shape, rng, timeline)
    replicas = [
        SimulatedReplica(f"replica-{i}", network, replica_shape(shape), transfers=transfers)
        for i in range(shape.num_replicas)
    ]
    router = SimulatedRouter(
        "router",
        network,
        replicas,
        (config or RouterConfig()).model_copy(update={"routing_policy": routing}),
        limits or LimitsConfig(max_queued=len(trace)),
        make_text=lambda request: NoText(),
        seed=rng.getrandbits(32),
        order=shape.scheduler,
    )
    for process in (*replicas, router):
        timeline.at(0.0, process.start)
    clients = [MeteredClient(number, arrival, network, router) for number, arrival in enumerate(trace)]
    for client, arrival in zip(clients, trace, strict=True):
        timeline.at(BEGIN_S + arrival.arrival_s, client.begin)
    num_over = 0
    while num_over < len(clients) and timeline.step():
        if timeline.num_events % 2000 == 0:
            num_over = sum(client.is_over for client in clients)
            on_done(num_over)
    on_done(len(clients))
    stats = [replica.core.scheduler.stats() for replica in replicas]
    return CapacityResult(
        routing=routing,
        rate=_rate(trace),
        services=[client.service() for client in clients],
        duration_s=max(client.last_s for client in clients) - BEGIN_S - trace[0].arrival_s,
        busy_s=[replica.busy_s for replica in replicas],
        prefix_hit_rate=_hit_rate(stats),
        num_adapter_loads=sum(each.num_adapter_loads for each in stats),
    )


def replica_shape(shape: ClusterShape) -> ReplicaShape:
    """Shape of each simulated replica."""
    return ReplicaShape(
        scheduler=shape.scheduler,
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        max_model_len=shape.max_model_len,
        eos_token_ids=frozenset(),
        vocab_size=2**31,
        prefix_caching=True,
        step_costs=shape.step_costs,
        make_runner=AnyTokenRunner,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        max_loras=shape.max_loras,
        adapter_load_s=shape.adapter_load_s,
    )


def _transfers(shape: ClusterShape, rng: random.Random, timeline: Timeline) -> SimulatedTransfers | None:
    """Transfers at the speed of the network, which replicas know."""
    if not shape.kv_bytes_per_token:
        return None
    block_s = shape.block_size * shape.kv_bytes_per_token / shape.bytes_per_s
    figures = MovingFigures(copy_s_per_byte=COPY_S_PER_BYTE, received_bytes_per_s={"": shape.bytes_per_s})
    costs = TransferCosts(block_s=block_s, figures=figures, computing_factor=1.0)
    return SimulatedTransfers(random.Random(rng.getrandbits(32)), timeline.after, costs)


def _rate(trace: Sequence[Arrival]) -> float:
    """Arrivals per second; NaN for a single one, and for arrivals that come all at once."""
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    return (len(trace) - 1) / span_s if span_s else math.nan


def _hit_rate(stats: Sequence[EngineStats]) -> float:
    num_hits = sum(each.num_prefix_hit_tokens for each in stats)
    return num_hits / max(1, sum(each.num_prefix_query_tokens for each in stats))


def _is_good(service: Service, slo_ttft_s: float, slo_tpot_s: float) -> bool:
    if service.ttft_s is None or service.ttft_s > slo_ttft_s:
        return False
    return service.tpot_s is None or service.tpot_s <= slo_tpot_s
