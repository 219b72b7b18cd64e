"""Admission queue: the bounded queue of requests that wait in this router for a replica, ordered for each model.

The order is the worker's (`worker/waiting_queue.py`): by priority class, which improves with waiting, by tenant share,
by due time. Between class and tenant, requests that lost their replica go first, then those resumed after the loss of
their router, then new ones. The first have no bound and the second have their own, so that new requests cannot shut
them out. Nor can one tenant's requests shut out another's: a full queue still takes those of a tenant with less than
its share of it. Quarantine suspects that wait for a trial are held aside, unordered; requests that wait for a replica
of their version while other versions serve are parked, in the order in which they would have left.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final

from holdfast.router.dispatch.replica_state import Pace
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_status import RequestStatus, Standing
from holdfast.worker.config import ServiceOrderConfig
from holdfast.worker.errors import QueueFullError
from holdfast.worker.timers import Timers
from holdfast.worker.waiting_queue import TenantCounters, WaitingQueue

MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0

TTFT_SHARE: Final = 0.3
"""Share of the longest time to a first token that a new request may be expected to wait here."""

LATEST_START: Final = 0.5
"""Share of the same after which a new request that still waits would be too late."""

OVERFLOW: Final = 2
"""Maximum length of a queue as a multiple of its bound: beyond the bound, only tenants below their share may enter."""


class AdmissionQueue:
    """Waiting requests. Each model has its own order and tenant accounts, because models share no replicas."""

    def __init__(self, max_queued: int, order: ServiceOrderConfig, max_ttft_s: float | None = None) -> None:
        self._max_queued = max_queued
        self._order = order
        self._max_ttft_s = math.inf if max_ttft_s is None else max_ttft_s
        self._paces = defaultdict[str, Pace](Pace)
        """Paces of departures, by model."""
        self._latest_starts = Timers[RequestState]()
        self._queues: dict[str, WaitingQueue[RequestState]] = {}
        self._tenants: dict[str, TenantCounters] = {}
        """The accounts of each model's queue."""
        self._held: dict[str, dict[RequestState, None]] = {}
        self._parked: dict[str, dict[str, dict[RequestState, None]]] = {}
        """Parked requests by model and version."""
        self.num_waiting = 0
        """Requests here, of all models, held and parked ones too."""
        self._num_resumed = 0
        self._num_of_tenant = Counter[str]()

    def push(self, state: RequestState, now: float) -> None:
        """Queues a new request. Raises `QueueFullError` with an estimate of when to retry."""
        is_resumed = state.standing is Standing.RESUMED
        num_before = self._num_resumed if is_resumed else self.num_waiting
        if num_before >= self._max_queued:
            num_waiting = self.num_waiting
            if is_resumed or not self._has_share_left(state.request.tenant, num_waiting, self._max_queued):
                raise self._full(state, num_before, "limits.max_queued")
        has_first_token_due = not is_resumed and not _is_later_sibling(state)
        if has_first_token_due:
            self._check_wait(state)
        self._enter(state, now)
        if has_first_token_due and self._max_ttft_s < math.inf:
            self._latest_starts.set(state, now + LATEST_START * self._max_ttft_s)

    def put_back(self, state: RequestState, now: float) -> None:
        """Queues a request that was admitted before, beyond the bound if need be. A suspect is held aside."""
        if state.status is RequestStatus.HELD:
            self._held.setdefault(state.model, {})[state] = None
            self._count(state, 1)
        else:
            self._enter(state, now)

    def charge_at_once(self, state: RequestState) -> None:
        """Finds the account of a request that need not wait here. There is no waiting queue for its model."""
        self._queue_of(state.model)
        state.tenant = self._tenants[state.model].served_at_once(state.request.tenant)

    def pop(self, state: RequestState, now: float) -> None:
        """Takes out a request that goes to a replica, and updates the estimate of the departure rate."""
        self._take_out(state)
        self._paces[state.model].note(now, more_due=self.has_any(state.model))

    def park(self, state: RequestState, version: str) -> None:
        """Lets others go before a request of the queue until there is room for it at a replica of its version."""
        self._queues[state.model].remove(state)
        self._parked.setdefault(state.model, {}).setdefault(version, {})[state] = None
        state.parked_for = version

    def first_parked(self, model: str) -> list[RequestState]:
        """The request of each version that has been parked the longest."""
        return [next(iter(states)) for states in self._parked.get(model, {}).values()]

    def remove(self, state: RequestState) -> None:
        """Takes out a request that is given up. Its status must still be a waiting one."""
        self._take_out(state)
        if not self.has_any(state.model):
            self._paces[state.model].note_idle()

    def _take_out(self, state: RequestState) -> None:
        if state.status is RequestStatus.HELD:
            del self._held[state.model][state]
        elif state.parked_for:
            self._unpark(state)
            self._num_resumed -= state.standing is Standing.RESUMED
        else:
            self._queues[state.model].remove(state)
            self._num_resumed -= state.standing is Standing.RESUMED
        self._count(state, -1)
        self._latest_starts.drop(state)

    def advance(self, model: str, now: float) -> None:
        """Ages the requests of a model: requests that have waited long enough move to a better class."""
        if model in self._queues:
            self._queues[model].advance(now)

    def first(self, model: str) -> RequestState | None:
        """The request of a model that is next to leave, apart from held ones; None if none waits."""
        queue = self._queues.get(model)
        return queue.first() if queue is not None and queue.num_waiting else None

    def first_held(self, model: str) -> RequestState | None:
        """The request of a model that has been held the longest."""
        return next(iter(self._held.get(model, {})), None)

    def has_any(self, model: str) -> bool:
        """Whether a request of a model is here, held or not."""
        return any((self.first(model), self.first_held(model), self._parked.get(model)))

    def waiting(self, model: str) -> Iterator[RequestState]:
        """The requests of a model in order of service, then those held for a trial or a version."""
        yield from self._queues.get(model, ())
        yield from self.aside(model)

    def models_aside(self) -> list[str]:
        """The models of which any request stands aside."""
        return [model for model in {**self._held, **self._parked} if self._held.get(model) or self._parked.get(model)]

    def aside(self, model: str) -> Iterator[RequestState]:
        """Requests that are held or parked."""
        yield from self._held.get(model, ())
        for states in self._parked.get(model, {}).values():
            yield from states

    def retry_after_s(self, model: str) -> float:
        """Seconds until half of the waiting requests of a model will have left, at the recent rate."""
        pause_s = self._paces[model].mean_s
        if pause_s is None:
            return 1.0
        return min(max(pause_s * len(self._queues.get(model, ())) / 2, MIN_RETRY_S), MAX_RETRY_S)

    @property
    def next_late(self) -> float | None:
        """When `pop_late` will next return one, or None."""
        return self._latest_starts.next

    def pop_late(self, now: float) -> RequestState | None:
        """A request that has waited so long that its first token would be too late; it stays here. Until None."""
        return self._latest_starts.pop(now)

    def too_late(self, state: RequestState) -> QueueFullError:
        """The refusal of what `pop_late` has returned."""
        waited = f"no replica had room within {LATEST_START * self._max_ttft_s:g} s"
        return QueueFullError(f"{waited} (router.max_ttft_s)", self.retry_after_s(state.model))

    def check_integrity(self) -> None:
        """Asserts that all requests here have a waiting status, the right model, and are counted."""
        found: list[RequestState] = []
        for model in {*self._queues, *self._held}:
            waiting = list(self.waiting(model))
            assert all(state.model == model and state.status.is_waiting for state in waiting)
            parked = self._parked.get(model, {})
            assert all(states for states in parked.values()), f"{model}: no request waits for a version: {parked}"
            for version, states in parked.items():
                assert all(state.parked_for == version for state in states)
            assert all(state.status is RequestStatus.HELD for state in self._held.get(model, ()))
            found += waiting
        for queue in self._queues.values():
            queue.check_integrity()
        assert len(found) == self.num_waiting, f"{len(found)} are here, {self.num_waiting} were counted"
        assert Counter(state.request.tenant for state in found) == self._num_of_tenant
        in_order = [state.standing for state in found if state.status is not RequestStatus.HELD]
        assert in_order.count(Standing.ARRIVED) <= OVERFLOW * self._max_queued
        assert in_order.count(Standing.RESUMED) == self._num_resumed <= self._max_queued

    def _enter(self, state: RequestState, now: float) -> None:
        queue = self._queue_of(state.model)
        queue.advance(now)
        queue.add(state)
        self._num_resumed += state.standing is Standing.RESUMED
        self._count(state, 1)

    def _queue_of(self, model: str) -> WaitingQueue[RequestState]:
        queue = self._queues.get(model)
        if queue is None:
            tenants = self._tenants[model] = TenantCounters(self._order.tenant_shares)
            queue = self._queues[model] = WaitingQueue(tenants, self._order.aging_s, len(Standing))
        return queue

    def _unpark(self, state: RequestState) -> None:
        of_model = self._parked[state.model]
        del of_model[state.parked_for][state]
        if not of_model[state.parked_for]:
            del of_model[state.parked_for]
        state.parked_for = ""

    def _count(self, state: RequestState, change: int) -> None:
        tenant = state.request.tenant
        self.num_waiting += change
        self._num_of_tenant[tenant] += change
        if not self._num_of_tenant[tenant]:
            del self._num_of_tenant[tenant]

    def _has_share_left(self, tenant: str, num_waiting: int, most: int) -> bool:
        """Whether a tenant may enter a full queue: it has less than its share of it, among the tenants that wait."""
        shares = self._order.tenant_shares
        total = sum(shares.get(name, 1.0) for name in {*self._num_of_tenant, tenant})
        num_allowed = most * shares.get(tenant, 1.0) / total
        return num_waiting < OVERFLOW * most and self._num_of_tenant[tenant] < num_allowed

    def _check_wait(self, state: RequestState) -> None:
        """Raises `QueueFullError` if a new request would probably wait too long for its first token to be in time.

        Requests of a worse class are not counted. One request may always wait, however slow the pace, because the pace
        is measured by waiting requests.
        """
        queue, pause_s = self._queues.get(state.model), self._paces[state.model].mean_s
        if queue is None or not pause_s or self._max_ttft_s == math.inf:
            return
        num_before = queue.num_up_to(state.service_class)
        most = max(1, int(TTFT_SHARE * self._max_ttft_s / pause_s))
        if num_before >= most and not self._has_share_left(state.request.tenant, len(queue), most):
            raise self._full(state, num_before, "router.max_ttft_s")

    def _full(self, state: RequestState, num_before: int, setting: str) -> QueueFullError:
        num_own = self._num_of_tenant[state.request.tenant]
        message = f"{num_before} requests wait for a replica already, {num_own} of them this tenant's"
        return QueueFullError(f"{message} ({setting})", self.retry_after_s(state.model))


def _is_later_sibling(state: RequestState) -> bool:
    """Whether its answer begins with the first of its group, which alone has to be in time: a later sibling neither
    cuts the answer short, nor is refused because its own siblings wait before it.
    """
    return bool(state.request.group_id) and state.request.sequence_index > 0
