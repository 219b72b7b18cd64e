"""When each open request runs out of time: a heap that forgets what has ended.

No clock here: `now` is passed in, in seconds of whatever clock the deadlines were set by.
"""

import heapq


class Deadlines:
    """Deadlines by request id. The next one is always at hand; dropped ones are swept out before they pile up."""

    def __init__(self) -> None:
        self._when: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._when)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._when

    def set(self, request_id: str, when: float) -> None:
        assert request_id not in self._when, f"{request_id} has a deadline already"
        self._when[request_id] = when
        heapq.heappush(self._heap, (when, request_id))

    def of(self, request_id: str) -> float:
        """A deadline that was set."""
        return self._when[request_id]

    def drop(self, request_id: str) -> None:
        """Forgets a deadline that was set."""
        del self._when[request_id]
        if len(self._heap) > 2 * len(self._when) + 64:
            self._heap = [(when, request_id) for request_id, when in self._when.items()]
            heapq.heapify(self._heap)

    @property
    def next(self) -> float | None:
        """The earliest deadline, or None."""
        while self._heap and self._when.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> list[str]:
        """The requests whose time is up, earliest first. They keep their deadlines until they are dropped."""
        if self.next is None or self.next > now:
            return []
        due = [(when, request_id) for request_id, when in self._when.items() if when <= now]
        return [request_id for _, request_id in sorted(due)]
