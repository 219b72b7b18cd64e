"""Who waits, in order of service: by class, then by tenant, then by deadline, then by arrival.

What may live here: the order, and aging, which moves those who have waited long to a better class. What may not:
whether there is room for the first (`batching.py`), blocks (`queues.py`), and a clock: the time is passed in.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise

from holdfast.worker.request import Priority
from holdfast.worker.scheduling.sequence import Sequence
from holdfast.worker.scheduling.tenants import TenantCounters
from holdfast.worker.service_order.timers import Timers

_Entry = tuple[float, float, int, str]
"""Counter of a tenant, urgency of its first sequence, and its name."""


_PRIORITIES = tuple(Priority)


class WaitingSequences:
    """The waiting sequences of one scheduler. Finding the first costs O(log tenants), all else O(log sequences).

    A sequence stands in the class `Sequence.service_class`. That is its request's priority at first, and one class
    better after every `aging_s` seconds that it has waited, all its waits together; it never gets worse. Inside a class
    the tenant with the smallest counter comes first (`tenants.py`), and of a tenant's the one that is due first.
    """

    def __init__(self, tenants: TenantCounters, aging_s: float) -> None:
        self._tenants = tenants
        self._aging_s = aging_s
        self._now = 0.0
        self._classes = tuple(_WaitingClass() for _ in Priority)
        self._promotions = Timers[Sequence]()
        self._num_waiting = 0
        self._aside: list[Sequence] = []

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """In order of service, as if nobody's counter changed on the way."""
        for waiting_class in self._classes:
            yield from waiting_class

    @property
    def num_ready(self) -> int:
        """Those who do not stand aside."""
        return self._num_waiting - len(self._aside)

    @property
    def best_class(self) -> Priority | None:
        """The class of the first, or None if nobody is ready."""
        for priority, waiting_class in zip(_PRIORITIES, self._classes, strict=True):  # at every step, so no generator
            if waiting_class:
                return priority
        return None

    def first(self) -> Sequence:
        """The one to be served next. There must be one."""
        best_class = self.best_class
        assert best_class is not None, "nobody waits"
        return self._classes[best_class].first()

    def add(self, sequence: Sequence) -> None:
        self._tenants.note_waiting(sequence.tenant)
        sequence.waits_since_s = self._now
        self._classes[sequence.service_class].add(sequence)
        self._num_waiting += 1
        self._expect_promotion(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._classes[sequence.service_class].remove(sequence)
        self._num_waiting -= 1
        self._tenants.note_gone(sequence.tenant)
        sequence.waited_s += self._now - sequence.waits_since_s
        self._promotions.drop(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Let others go before it, until `return_all`. It waits on: for its tenant, and for its age."""
        self._classes[sequence.service_class].remove(sequence)
        self._aside.append(sequence)

    def return_all(self) -> None:
        """Put those who stood aside back in line."""
        for sequence in self._aside:
            self._classes[sequence.service_class].add(sequence)
        self._aside.clear()

    def advance(self, now: float) -> None:
        """Time has passed: whoever has waited long enough moves to the next better class."""
        self._now = max(self._now, now)
        while (sequence := self._promotions.pop(self._now)) is not None:
            self._classes[sequence.service_class].remove(sequence)
            sequence.service_class = Priority(sequence.service_class - 1)
            self._classes[sequence.service_class].add(sequence)
            self._expect_promotion(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless everyone stands where its class, tenant and urgency say. O(sequences)."""
        num_found = 0
        for priority, waiting_class in zip(Priority, self._classes, strict=True):
            waiting_class.check_integrity()
            for sequence in waiting_class:
                assert sequence.service_class == priority, f"{sequence.sequence_id} stands in class {priority}"
                num_found += 1
        assert num_found == self._num_waiting, f"{num_found} sequences wait, and {self._num_waiting} were counted"

    def _expect_promotion(self, sequence: Sequence) -> None:
        if sequence.service_class > Priority.CRITICAL:
            num_classes = sequence.request.priority - sequence.service_class + 1
            wait_s = num_classes * self._aging_s - sequence.waited_s
            self._promotions.set(sequence, sequence.waits_since_s + wait_s)


class _WaitingClass:
    """Those of one class: a line for each tenant, and a heap of the tenants.

    A tenant's key (its counter, and the urgency of its first) rises whenever it is served, and falls only when someone
    more urgent joins its line. So the heap holds one entry that counts for each tenant, never above its key: it is
    renewed when a key falls, and brought up to date when it has come to the top.
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[Sequence]] = {}
        self._entries: dict[str, _Entry] = {}
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        """Tenants with anyone in line."""
        return len(self._lines)

    def __iter__(self) -> Iterator[Sequence]:
        for line in sorted(self._lines.values(), key=_key):
            yield from line

    def first(self) -> Sequence:
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

    def add(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        line = self._lines.setdefault(name, [])
        insort(line, sequence, key=_urgency)
        if line[0] is sequence:
            self._entries[name] = _key(line)
            heapq.heappush(self._heap, self._entries[name])

    def remove(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        line = self._lines[name]
        index = bisect_left(line, _urgency(sequence), key=_urgency)
        assert line[index] is sequence, f"sequence {sequence.sequence_id} is not where its urgency says"
        del line[index]
        if not line:
            del self._lines[name], self._entries[name]
        if not self._lines:
            self._heap.clear()

    def check_integrity(self) -> None:
        for name, line in self._lines.items():
            assert line, f"tenant {name!r} has an empty line"
            assert self._entries[name] in self._heap, f"tenant {name!r} is not in the heap"
            assert self._entries[name] <= _key(line), f"tenant {name!r} stands behind its turn"
            for before, after in pairwise(line):
                assert before.urgency < after.urgency, f"{after.sequence_id} stands behind its turn"


def _urgency(sequence: Sequence) -> tuple[float, int]:
    return sequence.urgency


def _key(line: list[Sequence]) -> _Entry:
    first = line[0]
    return (first.tenant.counter, *first.urgency, first.tenant.name)
