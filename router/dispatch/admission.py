"""The bounded queue of requests that wait in this router for a replica, each model's in the order of service.

That order is the worker's (`worker/service_order/`): by class, which betters with waiting, by tenant's share, by due
time. Between class and tenant stands what brought a request here: one that has lost its replica goes first, then one
that comes with output because it has lost its router. Both were admitted before, so they have a bound of their own or
none, and newcomers cannot shut them out. What is held, as it waits for a trial, keeps out of the order. What may live
here: the bounds, and how long until there is room. What may not: when a request may leave (`placement.py`), clocks.
"""

from collections.abc import Iterator

from holdfast.router.dispatch.request_state import RequestState, RequestStatus, Standing
from holdfast.worker.config import ServiceOrderConfig
from holdfast.worker.errors import QueueFullError
from holdfast.worker.service_order.tenants import TenantCounters
from holdfast.worker.service_order.waiting_queue import WaitingQueue

MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0
SMOOTHING = 0.1
"""Weight of the newest pause between two departures in the running mean."""


class AdmissionQueue:
    """Waiting requests, with one order and one set of tenants' accounts for each model: models share no replicas."""

    def __init__(self, max_queued: int, order: ServiceOrderConfig) -> None:
        self._max_queued = max_queued
        self._order = order
        self._queues: dict[str, WaitingQueue[RequestState]] = {}
        self._held: dict[str, dict[RequestState, None]] = {}
        self._num_waiting = 0
        self._num_resumed = 0
        self._last_pop: float | None = None
        self._mean_pause_s: float | None = None

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, state: RequestState, now: float) -> None:
        """Queues a request that has just come. Raises `QueueFullError` with an estimate of when to come back."""
        num_before = self._num_resumed if state.standing is Standing.RESUMED else self._num_waiting
        if num_before >= self._max_queued:
            message = f"{num_before} requests wait for a replica already (limits.max_queued)"
            raise QueueFullError(message, self.retry_after_s())
        self._enter(state, now)

    def put_back(self, state: RequestState, now: float) -> None:
        """Queues a request that was admitted before, whatever the bound. A suspect is held until it is popped."""
        if state.status is RequestStatus.HELD:
            self._held.setdefault(state.model, {})[state] = None
            self._num_waiting += 1
        else:
            self._enter(state, now)

    def pass_by(self, state: RequestState, now: float) -> None:
        """Opens the account of a request that need not wait, as if it had waited for no time."""
        self._enter(state, now)
        self.remove(state)

    def pop(self, state: RequestState, now: float) -> None:
        """Takes out a request that goes to a replica. `now` keeps the estimate of the pace."""
        self.remove(state)
        self._note_departure(now)

    def remove(self, state: RequestState) -> None:
        """Takes out a request that waits here and will not wait any longer. Its status still says that it waits."""
        if state.status is RequestStatus.HELD:
            del self._held[state.model][state]
        else:
            self._queues[state.model].remove(state)
            self._num_resumed -= state.standing is Standing.RESUMED
        self._num_waiting -= 1

    def advance(self, model: str, now: float) -> None:
        """Time has passed: whoever has waited long enough for a model stands in a better class."""
        if model in self._queues:
            self._queues[model].advance(now)

    def first(self, model: str) -> RequestState | None:
        """The request of a model that is next to leave, those held aside; None if none waits."""
        queue = self._queues.get(model)
        return queue.first() if queue else None

    def first_held(self, model: str) -> RequestState | None:
        """The request of a model that has been held the longest."""
        return next(iter(self._held.get(model, {})), None)

    def has_any(self, model: str) -> bool:
        """Whether a request of a model is here, held or not."""
        return self.first(model) is not None or self.first_held(model) is not None

    def waiting(self, model: str) -> Iterator[RequestState]:
        """The requests of a model, first to leave first, then those held."""
        yield from self._queues.get(model, ())
        yield from self._held.get(model, ())

    def retry_after_s(self) -> float:
        """Seconds until half of what waits now will have left, at the pace of late."""
        if self._mean_pause_s is None:
            return 1.0
        return min(max(self._mean_pause_s * self._num_waiting / 2, MIN_RETRY_S), MAX_RETRY_S)

    def check_integrity(self) -> None:
        """Asserts that everyone here waits, for the right model, and is counted."""
        found: list[RequestState] = []
        for model in {*self._queues, *self._held}:
            waiting = list(self.waiting(model))
            assert all(state.model == model and state.status.is_waiting for state in waiting)
            assert all(state.status is RequestStatus.HELD for state in self._held.get(model, ()))
            found += waiting
        for queue in self._queues.values():
            queue.check_integrity()
        assert len(found) == self._num_waiting, f"{len(found)} are here, {self._num_waiting} were counted"
        in_order = [state.standing for state in found if state.status is not RequestStatus.HELD]
        assert in_order.count(Standing.ARRIVED) <= self._max_queued
        assert in_order.count(Standing.RESUMED) == self._num_resumed <= self._max_queued

    def _enter(self, state: RequestState, now: float) -> None:
        queue = self._queues.get(state.model)
        if queue is None:
            tenants = TenantCounters(self._order.tenant_shares)
            queue = self._queues[state.model] = WaitingQueue(tenants, self._order.aging_s, len(Standing))
        queue.advance(now)
        queue.add(state)
        self._num_waiting += 1
        self._num_resumed += state.standing is Standing.RESUMED

    def _note_departure(self, now: float) -> None:
        """Pauses count only while somebody waits: an idle night says nothing of the pace."""
        if self._last_pop is not None:
            pause_s = max(now - self._last_pop, 0.0)
            mean = pause_s if self._mean_pause_s is None else self._mean_pause_s
            self._mean_pause_s = mean + SMOOTHING * (pause_s - mean)
        self._last_pop = now if self._num_waiting else None
