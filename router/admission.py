"""The bounded queue of requests that wait in this router for a replica: by priority, then by arrival.

What may live here: the order, the bound, and how long until there is room. What may not: when a request may leave
(`dispatch.py`), what it contains, clocks.
"""

from collections.abc import Iterator

from worker.errors import QueueFullError
from worker.request import Priority

MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0
SMOOTHING = 0.1
"""Weight of the newest pause between two departures in the running mean."""


class AdmissionQueue:
    """Requests by id, in one lane per model and priority. Every operation takes constant time."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._lanes: dict[str, dict[Priority, dict[str, None]]] = {}
        self._place: dict[str, tuple[str, Priority]] = {}
        self._last_pop: float | None = None
        self._mean_pause_s: float | None = None

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._place

    def push(self, request_id: str, model: str, priority: Priority) -> None:
        """Queues a request. Raises `QueueFullError` with an estimate of when to come back."""
        if len(self._place) >= self._max_queued:
            message = f"{len(self._place)} requests wait for a replica already (limits.max_queued)"
            raise QueueFullError(message, self.retry_after_s())
        lanes = self._lanes.setdefault(model, {level: {} for level in Priority})
        lanes[priority][request_id] = None
        self._place[request_id] = (model, priority)

    def pop(self, model: str, now: float) -> str:
        """The next request of a model, which must have one waiting. `now` keeps the estimate of the pace."""
        lane = next(lane for lane in self._lanes[model].values() if lane)
        request_id = next(iter(lane))
        self.remove(request_id)
        self._note_departure(now)
        return request_id

    def remove(self, request_id: str) -> None:
        """Takes out a request that waits here and will not wait any longer."""
        model, priority = self._place.pop(request_id)
        del self._lanes[model][priority][request_id]

    def has_waiting(self, model: str) -> bool:
        return bool(self._place) and any(self._lanes.get(model, {}).values())

    def waiting(self, model: str) -> Iterator[str]:
        """The requests of a model, first to leave first."""
        for lane in self._lanes.get(model, {}).values():
            yield from lane

    def retry_after_s(self) -> float:
        """Seconds until half of what waits now will have left, at the pace of late."""
        if self._mean_pause_s is None:
            return 1.0
        return min(max(self._mean_pause_s * len(self._place) / 2, MIN_RETRY_S), MAX_RETRY_S)

    def check_integrity(self) -> None:
        """Asserts that every request is in exactly one lane, the right one."""
        found = [
            (request_id, (model, priority))
            for model, lanes in self._lanes.items()
            for priority, lane in lanes.items()
            for request_id in lane
        ]
        assert len(found) == len(self._place), f"{len(found)} in lanes, {len(self._place)} known"
        assert dict(found) == self._place
        assert len(found) <= self._max_queued

    def _note_departure(self, now: float) -> None:
        """Pauses count only while somebody waits: an idle night says nothing of the pace."""
        if self._last_pop is not None:
            pause_s = max(now - self._last_pop, 0.0)
            mean = pause_s if self._mean_pause_s is None else self._mean_pause_s
            self._mean_pause_s = mean + SMOOTHING * (pause_s - mean)
        self._last_pop = now if self._place else None
