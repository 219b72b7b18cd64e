"""Deadlines of requests: those that have passed, and waiting requests that can no longer reach a first token in time.

What may live here: when a request is hopeless. What may not: a clock, and dropping requests (`scheduler.py`).
"""

import math

from holdfast.worker.scheduling.queues import SequenceQueues
from holdfast.worker.scheduling.sequence import Sequence, SequenceStatus
from holdfast.worker.service_order.timers import Timers


class DeadlineWatch:
    """The deadlines of all requests that have not ended."""

    def __init__(self, queues: SequenceQueues) -> None:
        self._queues = queues
        self._timers = Timers[Sequence]()
        self.tokens_per_s: float | None = None
        """The most that can be computed in a second; None: not known."""

    def watch(self, sequence: Sequence) -> None:
        """Watches a sequence until it is forgotten. One without a deadline is never returned by `pop`."""
        if sequence.deadline_s < math.inf:
            self._timers.set(sequence, self._latest_start_s(sequence))

    def forget(self, sequence: Sequence) -> None:
        self._timers.drop(sequence)

    def next_expired(self, now: float) -> Sequence | None:
        """A sequence whose deadline has passed; it is no longer watched. To be called until None."""
        while (sequence := self._timers.pop(now)) is not None:
            # What was true when the timer was set may not be true any more: it runs now, or its prefix is cached.
            latest_start_s = self._latest_start_s(sequence)
            if latest_start_s <= now:
                return sequence
            self._timers.set(sequence, latest_start_s)
        return None

    def _latest_start_s(self, sequence: Sequence) -> float:
        """The latest time to begin running: a bound for the best case, in which no other request is served."""
        is_new = sequence.status is SequenceStatus.WAITING and sequence.num_output_tokens == 0
        if self.tokens_per_s is None or not is_new:
            return sequence.deadline_s
        num_cached = len(self._queues.cached_prefix(sequence)) * self._queues.allocator.block_size
        return sequence.deadline_s - (len(sequence.token_ids) - num_cached) / self.tokens_per_s
