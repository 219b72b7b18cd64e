"""Timers, at most one due time for each key, as a heap with lazy deletion; and a wall clock that does not jump.

Entries of dropped keys are swept before they pile up. No clock of the system's is read here: times are passed in, in
seconds of the caller's clock.
"""

import heapq
from collections.abc import Callable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")

_SLACK: Final = 64
"""Dropped entries that may lie in the heap whatever its size."""


class Timers(Generic[Key]):
    """Times by key, at most one for each. All calls cost O(log n), but for a sweep now and then."""

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[float, int, Key]] = {}
        """The one of each key that counts. A number, of the call to `set`, orders timers that are due at the same
        time.
        """
        self._heap: list[tuple[float, int, Key]] = []
        self._num_set = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def set(self, key: Key, when: float) -> None:
        """Sets a key's time, replacing an earlier one."""
        self._num_set += 1
        self._entries[key] = (when, self._num_set, key)
        heapq.heappush(self._heap, self._entries[key])
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def of(self, key: Key) -> float:
        """A time that was set."""
        return self._entries[key][0]

    def drop(self, key: Key) -> None:
        """A key without a time is ignored."""
        self._entries.pop(key, None)

    @property
    def next(self) -> float | None:
        """The earliest time, or None."""
        while self._heap and self._entries.get(self._heap[0][-1]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> Key | None:
        """The key that is due first, if it is due by now; its time is dropped. To be called until None."""
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            key = entry[-1]
            if self._entries.get(key) is entry:
                del self._entries[key]
                return key
        return None


class WallClock:
    """Called, it says the seconds since 1970."""

    __slots__ = ("_offset_s", "_steady")

    def __init__(self, now_s: float, steady: Callable[[], float]) -> None:
        """`now_s`: since 1970, as the system has it now. `steady` goes on from any moment, without jumps."""
        self._steady = steady
        self._offset_s = now_s - steady()

    def __call__(self) -> float:
        return self._offset_s + self._steady()
