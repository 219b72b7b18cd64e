"""When each of some sequences is due: a heap that forgets what was dropped.

No clock here: times are passed in, in seconds of whatever clock the caller goes by.
"""

import heapq
from typing import Final

from holdfast.worker.scheduling.sequence import Sequence

_SLACK: Final = 64
"""Dropped entries that may lie in the heap whatever its size."""


class SequenceTimers:
    """At most one time for each sequence. All calls cost O(log n), but for a sweep now and then."""

    def __init__(self) -> None:
        self._when: dict[Sequence, float] = {}
        self._heap: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._when)

    def set(self, sequence: Sequence, when: float) -> None:
        """In the place of an earlier time, if there was one."""
        self._when[sequence] = when
        heapq.heappush(self._heap, (when, sequence.sequence_id, sequence))
        if len(self._heap) > 2 * len(self._when) + _SLACK:
            self._heap = [(due, item.sequence_id, item) for item, due in self._when.items()]
            heapq.heapify(self._heap)

    def drop(self, sequence: Sequence) -> None:
        """A sequence without a time is ignored."""
        self._when.pop(sequence, None)

    def pop(self, now: float) -> Sequence | None:
        """The sequence that is due first, if it is due by now; its time is dropped. To be called until None."""
        while self._heap and self._heap[0][0] <= now:
            when, _, sequence = heapq.heappop(self._heap)
            if self._when.get(sequence) == when:
                del self._when[sequence]
                return sequence
        return None
