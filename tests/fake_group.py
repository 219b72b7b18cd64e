"""Tensor-parallel ranks as threads of one process: fast, and a failure on one rank ends them all."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.tensor_parallel import Message, TensorParallelGroup, ordered_sum

T = TypeVar("T")


def run_ranks(size: int, fn: Callable[["FakeGroup"], T], timeout_s: float = 60.0) -> list[T]:
    """Runs `fn(group)` on one thread per rank, with gradients off; the results in rank order.

    The error of the rank that failed first is raised. A rank that waits `timeout_s` for the others fails.
    """
    meeting = _Meeting(size, timeout_s)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(_run_rank, FakeGroup(rank, meeting), fn) for rank in range(size)]
    if meeting.failure is not None:
        raise meeting.failure
    return [future.result() for future in futures]


class FakeGroup(TensorParallelGroup):
    """One rank's end of a meeting of threads."""

    def __init__(self, rank: int, meeting: "_Meeting") -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return ordered_sum(self._meeting.exchange(self.rank, x)) if self.size > 1 else x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._meeting.exchange(self.rank, x), dim)

    def broadcast(self, message: Message | None) -> Message:
        assert (message is not None) == (self.rank == 0), "the leader, and only the leader, has the message"
        return np.array(self._meeting.exchange(self.rank, message)[0], dtype=np.int64)

    def close(self) -> None:
        self._meeting.barrier.abort()


class _Meeting:
    """Where the threads put what they share."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.failure: BaseException | None = None
        """The error of the rank that failed first."""
        self._slots: list = [None] * size
        self._lock = threading.Lock()

    def fail(self, error: BaseException) -> None:
        """Ends the others, also one that has not left the last barrier yet: what they raise comes later."""
        with self._lock:
            self.failure = self.failure or error
        self.barrier.abort()

    def exchange(self, rank: int, value: object) -> list:
        """Everybody's value, in rank order. Nobody leaves before all have read."""
        self._slots[rank] = value
        self.barrier.wait()
        values = [v.clone() if isinstance(v, Tensor) else v for v in self._slots]
        self.barrier.wait()
        return values


def _run_rank(group: FakeGroup, fn: Callable[[FakeGroup], T]) -> T:
    torch.get_num_threads()  # a new thread's oneDNN calls use torch's number of threads only after this
    try:
        with torch.inference_mode():
            return fn(group)
    except BaseException as error:
        group._meeting.fail(error)
        raise
