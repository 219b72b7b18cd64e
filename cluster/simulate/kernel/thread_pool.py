"""Threads of a simulated process: work beside its event loop, a fixed number of jobs at a time, in order.

What may not live here: what a job costs, and what its end leads to.
"""

import heapq


class ThreadPool:
    """When each of its threads is free again."""

    def __init__(self, num_threads: int) -> None:
        self._free_s = [0.0] * num_threads

    def done_s(self, now: float, cost_s: float) -> float:
        """When a job that comes now is done: it begins once a thread is free."""
        done_s = max(now, self._free_s[0]) + cost_s
        heapq.heapreplace(self._free_s, done_s)
        return done_s
