"""The order of service, and accounts and aging in it, against the definition worked out by brute force."""

import random
from dataclasses import dataclass, field

import pytest

from holdfast.worker.request import EngineRequest, Priority
from holdfast.worker.waiting_queue import Tenant, TenantCounters, WaitingQueue
from tests.worker.schedulers import make_request

AGING_S = 5
SHARES = {"a": 2.0, "b": 0.5}
NUM_STANDINGS = 3


@dataclass(eq=False)
class Customer:
    """A waiter that is nothing else."""

    request: EngineRequest
    standing: int
    urgency: tuple[float, int]
    tenant: Tenant = field(init=False)
    service_class: Priority = field(init=False)
    waits_since_s: float = 0.0
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        self.service_class = self.request.priority


class Definition:
    """What the order is said to be: a list, and a dictionary of counters."""

    def __init__(self) -> None:
        self.waiting: list[Customer] = []
        self.since: dict[Customer, int] = {}
        self.waited: dict[Customer, int] = {}
        self.counters: dict[str, float] = {}
        self.last_active = ""

    def charge(self, name: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self.counters[name] += (num_prompt_tokens + 2 * num_output_tokens) / SHARES.get(name, 1.0)

    def add(self, customer: Customer, now: int) -> None:
        name, active = customer.request.tenant, {other.request.tenant for other in self.waiting}
        if name not in active:
            idle_floor = self.counters.get(self.last_active, 0.0)
            floor = min((self.counters[other] for other in active), default=idle_floor)
            self.counters[name] = max(self.counters.get(name, 0.0), floor)
        self.waiting.append(customer)
        self.since[customer] = now

    def remove(self, customer: Customer, now: int) -> None:
        self.waiting.remove(customer)
        self.waited[customer] = self.waited.get(customer, 0) + now - self.since[customer]
        if all(other.request.tenant != customer.request.tenant for other in self.waiting):
            self.last_active = customer.request.tenant

    def class_of(self, customer: Customer, now: int) -> int:
        waited = self.waited.get(customer, 0) + now - self.since[customer]
        return max(0, customer.request.priority - waited // AGING_S)

    def order(self, now: int) -> list[Customer]:
        return sorted(
            self.waiting,
            key=lambda who: (
                self.class_of(who, now),
                who.standing,
                self.counters[who.request.tenant],
                # of tenants whose counters are equal, the one whose first is the most urgent
                min(other.urgency for other in self._line(who, now)),
                who.urgency,
            ),
        )

    def _line(self, customer: Customer, now: int) -> list[Customer]:
        place = (customer.request.tenant, self.class_of(customer, now), customer.standing)
        return [
            other
            for other in self.waiting
            if (other.request.tenant, self.class_of(other, now), other.standing) == place
        ]


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40))])
def test_everyone_stands_where_the_definition_says(seed):
    rng = random.Random(seed)
    queue = WaitingQueue[Customer](TenantCounters(SHARES), AGING_S, NUM_STANDINGS)
    definition, served = Definition(), list[Customer]()
    for now in range(200):
        queue.advance(now)
        if rng.random() < 0.6:
            customer = served.pop(rng.randrange(len(served))) if served and rng.random() < 0.3 else _draw(rng, now)
            queue.add(customer)
            definition.add(customer, now)
        if definition.waiting and rng.random() < 0.5:
            leaves = queue.first() if rng.random() < 0.7 else rng.choice(definition.waiting)
            queue.remove(leaves)
            definition.remove(leaves, now)
            num_tokens = rng.randint(0, 9), rng.randint(0, 3)
            leaves.tenant.charge(*num_tokens)
            definition.charge(leaves.request.tenant, *num_tokens)
            served.append(leaves)
        queue.check_integrity()
        assert [_said(who) for who in queue] == [_said(who) for who in definition.order(now)]
        assert queue.best_class == min((definition.class_of(who, now) for who in definition.waiting), default=None)
        assert not definition.waiting or queue.first() is definition.order(now)[0]
        for who in definition.waiting:
            assert who.tenant.counter == definition.counters[who.request.tenant]


def test_whoever_stands_aside_comes_back_to_its_place():
    queue = WaitingQueue[Customer](TenantCounters({}), AGING_S, NUM_STANDINGS)
    rng = random.Random(1)
    customers = [_draw(rng, number) for number in range(30)]
    for customer in customers:
        queue.add(customer)
    order = list(queue)
    for customer in order[:5]:
        assert queue.first() is customer
        queue.set_aside(customer)
    assert queue.first() is order[5]
    assert queue.num_ready == 25
    queue.return_all()
    assert list(queue) == order


def _draw(rng: random.Random, number: int) -> Customer:
    request = make_request(str(number), tenant=rng.choice("abc"), priority=rng.choice(list(Priority)))
    return Customer(request, rng.randrange(NUM_STANDINGS), (float(number + rng.choice((3, 50, 600))), number))


def _said(customer: Customer) -> tuple[object, ...]:
    request = customer.request
    return request.request_id, request.tenant, customer.service_class, customer.standing, customer.urgency
