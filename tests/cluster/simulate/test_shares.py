"""More load than a cluster can serve, from three tenants, through both queues: the router's and the replicas'.

In virtual time. Each tenant keeps some requests open and sends the next one when one ends, so that all always wait.
"""

import random
from collections import Counter
from typing import Any

import pytest

from holdfast.cluster.simulate.actors.messages import Admitted, Generate
from holdfast.cluster.simulate.actors.replica import SimulatedReplica
from holdfast.cluster.simulate.actors.replica_link import ReplicaShape
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.capacity.capacity import AnyTokenRunner, NoText
from holdfast.cluster.simulate.kernel.network import Connection, Network
from holdfast.cluster.simulate.kernel.timeline import Timeline
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.generation import OutputDelta
from holdfast.worker.config import SchedulerConfig, ServiceOrderConfig
from holdfast.worker.request import EngineRequest, Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.step_time import StepCosts
from holdfast.worker.waiting_queue import OUTPUT_WEIGHT

AGING_S = 15.0
SHARES = {"gold": 4.0, "silver": 2.0, "free": 1.0}
SIZES = {"gold": (8, 4), "silver": (20, 8), "free": (40, 12)}
"""Tokens of a prompt and of an output, on average: the smaller the share, the larger the requests."""
NUM_OPEN = {"gold": 32, "silver": 12, "free": 6}
BEGIN_S, WARM_S, END_S = 1.0, 10.0, 60.0


class Overload:
    """One router, two replicas, and more requests than these have room for."""

    def __init__(self, order: ServiceOrderConfig | None = None) -> None:
        self.rng = random.Random(1)
        self.timeline = Timeline()
        self.network = Network(self.timeline, self.rng, 0.0005)
        self.scheduler = SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=64, aging_s=AGING_S, tenant_shares=SHARES
        )
        replicas = [SimulatedReplica(f"replica-{i}", self.network, self._shape()) for i in range(2)]
        self.router = SimulatedRouter(
            "router",
            self.network,
            replicas,
            RouterConfig(max_waiting_per_replica=4),
            LimitsConfig(),
            make_text=lambda request: NoText(),
            seed=1,
            order=order or self.scheduler,
        )
        for process in (*replicas, self.router):
            self.timeline.at(0.0, process.start)
        self.num_tokens: Counter[str] = Counter()
        """What each tenant has been charged since the cluster was warm, by what has come to its clients."""
        self.num_requests = 0
        self.num_waiting: list[int] = []

    def run(self) -> None:
        for tenant, num_open in NUM_OPEN.items():
            for _ in range(num_open):
                self.timeline.at(BEGIN_S, self.send_next, tenant)
        while self.timeline.now < END_S and self.timeline.step():
            if self.timeline.num_events % 500 == 0:
                self.router.check_integrity()
                self.num_waiting.append(self.router.dispatch_host.dispatch.num_queued)

    def send_next(self, tenant: str) -> None:
        num_prompt_tokens, num_output_tokens = (self.rng.randint(size // 2, size * 3 // 2) for size in SIZES[tenant])
        Customer(self, tenant, num_prompt_tokens, num_output_tokens, repeats=True).send()

    def _shape(self) -> ReplicaShape:
        return ReplicaShape(
            scheduler=self.scheduler,
            num_blocks=64,
            block_size=16,
            max_model_len=128,
            eos_token_ids=frozenset(),
            vocab_size=2**31,
            prefix_caching=True,
            step_costs=StepCosts(base_s=0.05, decode_s=0.0, token_s=0.0005, context_token_s=0.0),
            make_runner=AnyTokenRunner,
        )


class Customer:
    """One request, and what came of it."""

    def __init__(self, load: Overload, tenant: str, num_prompt: int, num_output: int, *, repeats: bool = False) -> None:
        self.load, self.tenant, self.repeats = load, tenant, repeats
        self.num_prompt, self.num_output = num_prompt, num_output
        self.first_token_s: float | None = None

    def send(self, priority: Priority = Priority.NORMAL) -> None:
        self.load.num_requests += 1
        request = EngineRequest(
            request_id=str(self.load.num_requests),
            prompt_token_ids=(self.load.num_requests,) * self.num_prompt,
            sampling_params=SamplingParams(seed=0, ignore_eos=True, max_tokens=self.num_output),
            tenant=self.tenant,
            priority=priority,
        )
        path = self.load.network.path("clients", self.load.router.site)
        connection = Connection(self.load.network, path, (self, self.load.router))
        connection.send(self, Generate(request=request, resume=None, timeout_s=1e9))

    def receive(self, connection: Connection, message: Any) -> None:
        now, load = self.load.timeline.now, self.load
        if isinstance(message, Admitted):
            return
        assert isinstance(message, OutputDelta), message
        if self.first_token_s is None:
            self.first_token_s = now
            load.num_tokens[self.tenant] += self.num_prompt * (now > WARM_S)
        load.num_tokens[self.tenant] += OUTPUT_WEIGHT * len(message.token_ids) * (now > WARM_S)

    def closed(self, connection: Connection) -> None:
        if self.repeats:
            self.load.send_next(self.tenant)


def test_three_tenants_get_their_shares_and_the_lowest_class_is_served():
    load = Overload()
    lowest = [Customer(load, tenant, 8, 4) for tenant in SHARES]
    for customer in lowest:
        load.timeline.at(WARM_S, customer.send, Priority.LOW)
    load.run()
    assert min(load.num_waiting[10:]) > 5, "there was no overload"
    total = sum(load.num_tokens.values())
    for tenant, share in SHARES.items():
        assert load.num_tokens[tenant] / total == pytest.approx(share / sum(SHARES.values()), rel=0.1), load.num_tokens
    for customer in lowest:
        # It has to age in both queues: in the router until it stands among the normal ones, and again in the replica.
        waited_s = customer.first_token_s - WARM_S
        assert AGING_S <= waited_s < 3 * AGING_S, waited_s


@pytest.mark.slow  # a planted fault
def test_a_router_that_knows_no_shares_would_not_give_them():
    load = Overload(ServiceOrderConfig(aging_s=AGING_S))
    load.run()
    total = sum(load.num_tokens.values())
    assert load.num_tokens["gold"] / total < 0.9 * 4 / 7
