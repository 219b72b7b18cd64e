"""Ranks as forked processes that share memory, each with Triton's interpreter to itself: they wait for one another.

Threads would not do: the interpreter keeps the place in the grid for the whole process.
"""

import mmap
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import torch

from tests.worker.executors.gpu.interpreter import interpreter  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.executors.gpu.peer_memory import PeerMemory
from holdfast.worker.executors.gpu.rank_exchange import POLL_S
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from tests.worker.executors.gpu.piped_group import PipedGroup, pipes_between

T = TypeVar("T")

_FORK = multiprocessing.get_context("fork")


class ForkedGroup(PipedGroup):
    """One rank's end, with shares of memory that were mapped before the fork."""

    data_timeout_s = 1_000_000 * POLL_S
    """So many looks at a flag, which take longer than any test: the leader draws for seconds here."""

    def __init__(self, rank: int, pipes: dict[int, Connection], shares: list[np.ndarray]) -> None:
        super().__init__(rank, pipes)
        self.shares = shares

    def share(self, group: TensorParallelGroup, num_words: int, device: torch.device) -> PeerMemory | str:
        """As `share_memory`. An exchange that is larger than there is room for gets none."""
        if self.shares[0].size < num_words:
            return "there is no such room"
        return PeerMemory(tuple(share.ctypes.data for share in self.shares), self.shares)


def fork_ranks(
    size: int, work: Callable[[ForkedGroup], T], *, share_words: int = 1 << 16, timeout_s: float = 240.0
) -> list[T]:
    """Runs `work` on each rank; the results in rank order. A rank that ends without one gives None."""
    shares = [np.frombuffer(mmap.mmap(-1, 4 * share_words), np.int32) for _ in range(size)]
    pipes = pipes_between(size, _FORK)
    answers = [_FORK.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        _FORK.Process(target=_run, args=(work, ForkedGroup(rank, pipes[rank], shares), answers[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    for _, end in answers:
        end.close()
    try:
        return _answers_of([start for start, _ in answers], timeout_s)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _answers_of(ends: list[Connection], timeout_s: float) -> list[Any]:
    """Raises the first error at once: the other ranks may wait for that one."""
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        ready = connection.wait([end for rank, end in enumerate(ends) if rank not in results], timeout_s)
        assert ready, f"only ranks {sorted(results)} have a result"
        for rank, end in enumerate(ends):
            if end in ready:
                results[rank] = _answer_of(end)
    return [results[rank] for rank in range(len(ends))]


def _answer_of(end: Connection) -> Any:
    try:
        result = pickle.loads(end.recv_bytes())
    except EOFError:
        return None
    if isinstance(result, BaseException):
        raise result
    return result


def _run(work: Callable[[ForkedGroup], T], group: ForkedGroup, answer: Connection) -> None:
    torch.set_num_threads(1)
    _let_others_run()
    try:
        with torch.inference_mode():
            result: Any = work(group)
    except BaseException:
        result = RuntimeError(f"rank {group.rank}: {traceback.format_exc()}")
    answer.send_bytes(pickle.dumps(result))  # multiprocessing's own way shares a tensor's memory, which ends here


_PAUSE_S = 2e-3
_LATE_S = 5e-3


def _let_others_run() -> None:
    """There are more ranks than cores: one that looks at a flag gives its core away for a moment."""
    plain = interpreter.InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(*arguments: Any) -> Any:
        time.sleep(_PAUSE_S)
        return plain(*arguments)

    interpreter.InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def read_late() -> None:
    """Makes this rank late at every barrier, one of which is between the wait for others and the reading."""

    def create_barrier(self: Any) -> None:
        time.sleep(_LATE_S)

    interpreter.InterpreterBuilder.create_barrier = create_barrier
