"""Waiting queue in order of service: by priority class, then by tenant, then by due time, then by arrival."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from holdfast.worker.request import EngineRequest, Priority
from holdfast.worker.timers import Timers

PROMPT_WEIGHT: Final = 1.0  # cost of a prompt token
OUTPUT_WEIGHT: Final = 2.0
"""Cost of an output token to its tenant, in prompt tokens. It costs more, as in the paper, because it takes a row of a
step for itself."""

_NUM_KEPT: Final = 1024
"""Most tenants without requests whose counters are kept."""


class Tenant:
    """One tenant's account. Compared by identity."""

    __slots__ = ("counter", "name", "num_waiting", "output_token_cost", "share")

    def __init__(self, name: str, share: float) -> None:
        self.name = name
        self.share = share
        """Weight: of two tenants who always have requests waiting, one with twice the share gets twice as much."""
        self.output_token_cost = OUTPUT_WEIGHT / share
        """Amount that `charge` adds to the counter for one output token."""
        self.counter = 0.0
        """Weighted tokens served, over the share. Never falls; the tenant with the smallest is served next."""
        self.num_waiting = 0

    def charge(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count tokens that are computed for it. Those from the prefix cache, and a replay's, cost nothing."""
        self.counter += (PROMPT_WEIGHT * num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens) / self.share


class TenantCounters:
    """All accounts of one queue.

    A tenant is active while it has requests waiting. A tenant that becomes active is lifted to the smallest counter of
    the active ones, or, if there are none, to that of the last active tenant: idling earns no credit, and service
    beyond one's share is remembered.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = dict(shares)
        self._tenants: dict[str, Tenant] = {}
        self._active: dict[str, Tenant] = {}
        self._last_active: Tenant | None = None
        self._sweep_at = _NUM_KEPT

    def __len__(self) -> int:
        return len(self._tenants)

    def of(self, name: str) -> Tenant:
        """The account of that name; a new one if there is none."""
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._sweep_at:
                self._sweep()
            tenant = self._tenants[name] = Tenant(name, self._shares.get(name, 1.0))
        return tenant

    def note_waiting(self, tenant: Tenant) -> None:
        """One more of its requests waits. O(1), but O(active tenants) for a tenant that becomes active."""
        if tenant.num_waiting == 0:
            tenant.counter = max(tenant.counter, self._floor())
            self._active[tenant.name] = tenant
        tenant.num_waiting += 1

    def note_gone(self, tenant: Tenant) -> None:
        """One less waits."""
        tenant.num_waiting -= 1
        if tenant.num_waiting == 0:
            del self._active[tenant.name]
            self._last_active = tenant

    def served_at_once(self, name: str) -> Tenant:
        """The account of a request that is served without a wait: lifted as if it had waited for no time."""
        tenant = self.of(name)
        if tenant.num_waiting == 0:
            tenant.counter = max(tenant.counter, self._floor())
            self._last_active = tenant
        return tenant

    def _floor(self) -> float:
        if self._active:
            return min(tenant.counter for tenant in self._active.values())
        return 0.0 if self._last_active is None else self._last_active.counter

    def _sweep(self) -> None:
        """Forget idle tenants that would be lifted in any case, so that a stream of new names does not accumulate."""
        floor = self._floor()
        self._tenants = {
            name: tenant for name, tenant in self._tenants.items() if tenant.num_waiting > 0 or tenant.counter > floor
        }
        self._sweep_at = max(_NUM_KEPT, 2 * len(self._tenants))


DUE_AFTER_S: Final = 600.0
"""Due time, after its arrival, of a request without a deadline or with a later one. Because it is finite, requests
without a deadline do not starve behind a stream of requests with deadlines."""

_urgency: Final = attrgetter("urgency")

_Entry = tuple[float, float, int, str]
"""Counter of a tenant, urgency of its first, and its name."""


class Waiter(Protocol):
    """A waiting entry: fields that the order reads and sets. Compared by identity."""

    tenant: Tenant
    """Tenant of its request, set whenever it is added."""
    service_class: Priority
    """Priority of its request at first; better after a long wait."""
    waits_since_s: float
    waited_s: float
    """All earlier waits together."""

    @property
    def request(self) -> EngineRequest: ...

    @property
    def standing(self) -> int:
        """Place within a class, whichever tenant's it is: the smaller goes first. Does not change while it waits."""

    @property
    def urgency(self) -> tuple[float, int]:
        """When it is due, and its number in the order of arrival: of one tenant's, the smaller goes first."""


AnyWaiter = TypeVar("AnyWaiter", bound=Waiter)


class WaitingQueue(Generic[AnyWaiter]):
    """Queue of one place. Finding the first costs O(log tenants), all else O(log waiters).

    A waiter stands in the class `service_class`. That is its request's priority at first, and one class better after
    every `aging_s` seconds that it has waited, all its waits together; it never gets worse. Inside a class, and there
    among waiters of one standing, the tenant with the smallest counter comes first (`waiting_queue.py`), and of a
    tenant's waiters the one that is due first.
    """

    def __init__(self, tenants: TenantCounters, aging_s: float, num_standings: int = 1) -> None:
        self._tenants = tenants
        self._aging_s = aging_s
        self._num_standings = num_standings
        self._now = 0.0
        self._lanes = tuple((priority, _Lane[AnyWaiter]()) for priority in Priority for _ in range(num_standings))
        self._promotions = Timers[AnyWaiter]()
        self.num_waiting = 0
        """Waiters, those set aside included. Read-only."""
        self._aside: list[AnyWaiter] = []

    def __len__(self) -> int:
        return self.num_waiting

    def __iter__(self) -> Iterator[AnyWaiter]:
        """Yields waiters in order of service, as if no tenant's counter changed on the way."""
        for _, lane in self._lanes:
            yield from lane

    @property
    def num_ready(self) -> int:
        """Waiters that are not set aside."""
        return self.num_waiting - len(self._aside)

    @property
    def best_class(self) -> Priority | None:
        """The class of the first, or None if no request is ready."""
        if self.num_waiting == 0:
            return None
        for priority, lane in self._lanes:  # at every step, so no generator
            if lane.num_waiting:
                return priority
        return None

    def num_up_to(self, priority: Priority) -> int:
        """Number of waiters of this class or a better one that are not set aside."""
        return sum(lane.num_waiting for lane_priority, lane in self._lanes if lane_priority <= priority)

    def first(self) -> AnyWaiter:
        """The one to be served next. There must be one."""
        for _, lane in self._lanes:
            if lane.num_waiting:
                return lane.first()
        raise AssertionError("the queue is empty")

    def add(self, waiter: AnyWaiter) -> None:
        """Adds a waiter to its tenant's line, in its class."""
        # Looked up anew: an account that was idle while its requests ran may have been forgotten.
        waiter.tenant = self._tenants.of(waiter.request.tenant)
        self._tenants.note_waiting(waiter.tenant)
        waiter.waits_since_s = self._now
        self._lane(waiter).add(waiter)
        self.num_waiting += 1
        self._expect_promotion(waiter)

    def remove(self, waiter: AnyWaiter) -> None:
        """Removes a waiter, wherever it stands, and adds its wait to `waited_s`."""
        self._lane(waiter).remove(waiter)
        self.num_waiting -= 1
        self._tenants.note_gone(waiter.tenant)
        waiter.waited_s += self._now - waiter.waits_since_s
        self._promotions.drop(waiter)

    def set_aside(self, waiter: AnyWaiter) -> None:
        """Let others go before it, until `return_all`. It waits on: for its tenant, and for its age."""
        self._lane(waiter).remove(waiter)
        self._aside.append(waiter)

    def return_all(self) -> None:
        """Put the waiters that were set aside back in line."""
        for waiter in self._aside:
            self._lane(waiter).add(waiter)
        self._aside.clear()

    def advance(self, now: float) -> None:
        """Aging: requests that have waited long enough by `now` move to the next better class."""
        self._now = max(self._now, now)
        while (waiter := self._promotions.pop(self._now)) is not None:
            self._lane(waiter).remove(waiter)
            waiter.service_class = Priority(waiter.service_class - 1)
            self._lane(waiter).add(waiter)
            self._expect_promotion(waiter)

    def check_integrity(self) -> None:
        """Raise AssertionError unless everyone stands where its class, tenant and urgency say. O(waiters)."""
        num_found = 0
        for index, (priority, lane) in enumerate(self._lanes):
            lane.check_integrity()
            for waiter in lane:
                place = f"{waiter.request.request_id} stands in class {priority}"
                assert waiter.service_class == priority, place
                assert waiter.standing == index % self._num_standings, f"{place} among those of another standing"
                num_found += 1
        assert num_found == self.num_waiting, f"{num_found} wait, and {self.num_waiting} were counted"

    def _lane(self, waiter: AnyWaiter) -> "_Lane[AnyWaiter]":
        return self._lanes[waiter.service_class * self._num_standings + waiter.standing][1]

    def _expect_promotion(self, waiter: AnyWaiter) -> None:
        if waiter.service_class > Priority.CRITICAL:
            num_classes = waiter.request.priority - waiter.service_class + 1
            wait_s = num_classes * self._aging_s - waiter.waited_s
            self._promotions.set(waiter, waiter.waits_since_s + wait_s)


class _Lane(Generic[AnyWaiter]):
    """Waiters of one class and standing: a line for each tenant, and a heap of the tenants.

    A tenant's key (its counter, and the urgency of its first) rises whenever it is served, and falls only when someone
    more urgent joins its line. So the heap holds one entry that counts for each tenant, never above its key: it is
    renewed when a key falls, and brought up to date when it has come to the top.
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[AnyWaiter]] = {}
        self._entries: dict[str, _Entry] = {}
        self._heap: list[_Entry] = []
        self.num_waiting = 0

    def __iter__(self) -> Iterator[AnyWaiter]:
        for line in sorted(self._lines.values(), key=_key):
            yield from line

    def first(self) -> AnyWaiter:
        while True:
            entry = self._heap[0]
            name = entry[-1]
            if self._entries.get(name) is not entry:
                heapq.heappop(self._heap)
                continue
            line = self._lines[name]
            key = _key(line)
            if entry == key:
                return line[0]
            self._entries[name] = key
            heapq.heapreplace(self._heap, key)

    def add(self, waiter: AnyWaiter) -> None:
        name = waiter.request.tenant
        line = self._lines.setdefault(name, [])
        insort(line, waiter, key=_urgency)
        self.num_waiting += 1
        if line[0] is waiter:
            self._entries[name] = _key(line)
            heapq.heappush(self._heap, self._entries[name])

    def remove(self, waiter: AnyWaiter) -> None:
        name = waiter.request.tenant
        line = self._lines[name]
        index = bisect_left(line, waiter.urgency, key=_urgency)
        assert line[index] is waiter, f"{waiter.request.request_id} is not where its urgency says"
        del line[index]
        self.num_waiting -= 1
        if not line:
            del self._lines[name], self._entries[name]
        if not self._lines:
            self._heap.clear()

    def check_integrity(self) -> None:
        assert self.num_waiting == sum(len(line) for line in self._lines.values())
        for name, line in self._lines.items():
            assert line, f"tenant {name!r} has an empty line"
            assert self._entries[name] in self._heap, f"tenant {name!r} is not in the heap"
            assert self._entries[name] <= _key(line), f"tenant {name!r} stands behind its turn"
            for before, after in pairwise(line):
                assert before.urgency < after.urgency, f"{after.request.request_id} stands behind its turn"


def _key(line: Sequence[Waiter]) -> _Entry:
    first = line[0]
    return (first.tenant.counter, *first.urgency, first.tenant.name)
