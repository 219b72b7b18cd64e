"""The bounded queue of requests that wait in this router for a replica: by priority, then by arrival.

Requests that have lost their replica come first in their class, then those that come with output because they have lost
their router: they were admitted before, so they have a bound of their own, and newcomers cannot shut them out. Held
ones keep out of the order until they are called by name. What may live here: the order, the bounds, and how long until
there is room. What may not: when a request may leave (`dispatch.py`), what it contains, clocks.
"""

from collections.abc import Iterator
from enum import IntEnum

from holdfast.worker.errors import QueueFullError
from holdfast.worker.request import Priority

MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0
SMOOTHING = 0.1
"""Weight of the newest pause between two departures in the running mean."""


class Standing(IntEnum):
    """What brought a request into the queue. Within a priority, the smaller goes first."""

    RETURNED = 0
    RESUMED = 1
    ARRIVED = 2


Lane = tuple[Priority, Standing]


class AdmissionQueue:
    """Requests by id, in one lane per model, priority and standing. Every operation takes constant time."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._lanes: dict[str, dict[Lane, dict[str, None]]] = {}
        self._held: dict[str, dict[str, None]] = {}
        self._place: dict[str, tuple[str, Lane | None]] = {}
        """Model and lane; no lane for what is held."""
        self._num_resumed = 0
        self._last_pop: float | None = None
        self._mean_pause_s: float | None = None

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._place

    def push(self, request_id: str, model: str, priority: Priority, *, is_resumed: bool = False) -> None:
        """Queues a request that has just come. Raises `QueueFullError` with an estimate of when to come back."""
        num_before = self._num_resumed if is_resumed else len(self._place)
        if num_before >= self._max_queued:
            message = f"{num_before} requests wait for a replica already (limits.max_queued)"
            raise QueueFullError(message, self.retry_after_s())
        self._enter(request_id, model, (priority, Standing.RESUMED if is_resumed else Standing.ARRIVED))

    def put_back(self, request_id: str, model: str, priority: Priority) -> None:
        """Queues a request that was admitted before: ahead of all that arrive in its class, and whatever the bound."""
        self._enter(request_id, model, (priority, Standing.RETURNED))

    def hold(self, request_id: str, model: str) -> None:
        """Keeps a request that was admitted before, until somebody pops it by name."""
        self._held.setdefault(model, {})[request_id] = None
        self._place[request_id] = (model, None)

    def pop(self, request_id: str, now: float) -> None:
        """Takes out a request that goes to a replica. `now` keeps the estimate of the pace."""
        self.remove(request_id)
        self._note_departure(now)

    def remove(self, request_id: str) -> None:
        """Takes out a request that waits here and will not wait any longer."""
        model, lane = self._place.pop(request_id)
        self._num_resumed -= _is_resumed(lane)
        del (self._held[model] if lane is None else self._lanes[model][lane])[request_id]

    def first(self, model: str) -> str | None:
        """The request of a model that is next to leave, those held aside; None if none waits."""
        if not self._place:
            return None
        return next((next(iter(lane)) for lane in self._lanes.get(model, {}).values() if lane), None)

    def first_held(self, model: str) -> str | None:
        """The request of a model that has been held the longest."""
        return next(iter(self._held.get(model, {})), None)

    def has_any(self, model: str) -> bool:
        """Whether a request of a model is here, held or not."""
        return self.first(model) is not None or self.first_held(model) is not None

    def waiting(self, model: str) -> Iterator[str]:
        """The requests of a model, first to leave first, then those held."""
        for lane in self._lanes.get(model, {}).values():
            yield from lane
        yield from self._held.get(model, {})

    def retry_after_s(self) -> float:
        """Seconds until half of what waits now will have left, at the pace of late."""
        if self._mean_pause_s is None:
            return 1.0
        return min(max(self._mean_pause_s * len(self._place) / 2, MIN_RETRY_S), MAX_RETRY_S)

    def check_integrity(self) -> None:
        """Asserts that every request is in exactly one lane, the right one."""
        found: list[tuple[str, tuple[str, Lane | None]]] = [
            (request_id, (model, key))
            for model, lanes in self._lanes.items()
            for key, lane in lanes.items()
            for request_id in lane
        ]
        found += [(request_id, (model, None)) for model, held in self._held.items() for request_id in held]
        assert len(found) == len(self._place), f"{len(found)} in lanes, {len(self._place)} known"
        assert dict(found) == self._place
        num_arrived = sum(lane is not None and lane[1] is Standing.ARRIVED for _, lane in self._place.values())
        assert num_arrived <= self._max_queued
        assert self._num_resumed == sum(_is_resumed(lane) for _, lane in self._place.values()) <= self._max_queued

    def _enter(self, request_id: str, model: str, lane: Lane) -> None:
        lanes = self._lanes.setdefault(model, {(level, standing): {} for level in Priority for standing in Standing})
        lanes[lane][request_id] = None
        self._place[request_id] = (model, lane)
        self._num_resumed += _is_resumed(lane)

    def _note_departure(self, now: float) -> None:
        """Pauses count only while somebody waits: an idle night says nothing of the pace."""
        if self._last_pop is not None:
            pause_s = max(now - self._last_pop, 0.0)
            mean = pause_s if self._mean_pause_s is None else self._mean_pause_s
            self._mean_pause_s = mean + SMOOTHING * (pause_s - mean)
        self._last_pop = now if self._place else None


def _is_resumed(lane: Lane | None) -> bool:
    return lane is not None and lane[1] is Standing.RESUMED
