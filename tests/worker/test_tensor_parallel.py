"""Sums in rank order, orders of any length, and a lost rank heard of at once: among threads and among real processes."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.fake_group import run_ranks
from worker.errors import ReplicaError
from worker.tensor_parallel import FIRST_PART, DistributedGroup, SingleRank, ordered_sum, pick_port


def test_parts_are_added_in_rank_order():
    parts = [torch.tensor([value]) for value in (1e8, -1e8, 1.0, 0.5)]
    assert ordered_sum(parts).item() == 1.5
    assert ordered_sum([parts[0], parts[2], parts[1], parts[3]]).item() == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype):
    eps = torch.finfo(dtype).eps
    parts = [torch.tensor([value], dtype=dtype) for value in (1.0, eps / 2, eps / 2)]
    assert ordered_sum(parts).item() == 1.0 + eps
    assert parts[0].item() == 1.0


def test_two_parts_give_the_same_bits_either_way():
    a, b = torch.randn(2, 1000).bfloat16()
    assert torch.equal(ordered_sum([a, b]), ordered_sum([b, a]))
    assert torch.equal(ordered_sum([a, b]), ordered_sum([a, b, torch.zeros_like(a)]))


def test_a_single_rank_keeps_what_it_has():
    group, x, message = SingleRank(), torch.randn(3), np.arange(3)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.broadcast(message) is message
    group.close()


def test_threads_stand_in_for_ranks():
    def on_rank(group):
        x = torch.full((2, 3), float(group.rank))
        order = group.broadcast(np.arange(5) if group.rank == 0 else None)
        return group.all_reduce(x), group.all_gather(x), group.all_gather(x, dim=0), order

    for total, columns, rows, order in run_ranks(3, on_rank):
        assert torch.equal(total, torch.full((2, 3), 3.0))
        assert columns[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert rows.shape == (6, 3)
        assert order.tolist() == [0, 1, 2, 3, 4]


def test_a_failing_thread_ends_the_others():
    def on_rank(group):
        if group.rank == 1:
            raise ValueError("rank 1 is broken")
        return group.all_reduce(torch.zeros(1))

    with pytest.raises(ValueError, match="rank 1 is broken"):
        run_ranks(3, on_rank)


# Real processes. Each function below runs on every rank, and what it returns comes back to the test.


def _exchange(rank: int, size: int, rendezvous: str) -> dict[str, Any]:
    group = DistributedGroup(rank, size, rendezvous)
    x = torch.tensor([[1e8, -1e8, 1.0][rank], float(rank)])
    big = np.arange(3 * FIRST_PART) ** 2
    lengths = []
    for message in (np.arange(3), big, big[: FIRST_PART - 1], big[:FIRST_PART], big[:0]):
        received = group.broadcast(message if rank == 0 else None)
        assert np.array_equal(received, message)
        lengths.append(len(received))
    result = {
        "sum": group.all_reduce(x.clone()).tolist(),
        "half_sum": group.all_reduce(x.bfloat16()).dtype,
        "gathered": group.all_gather(x[1:]).tolist(),
        "strided": group.all_gather(x.repeat(4).view(4, 2)[:, 1:], dim=0).shape,
        "lengths": lengths,
    }
    group.close()
    return result


def _lose_rank_two(rank: int, size: int, rendezvous: str) -> str:
    """Rank 2 dies; the leader waits for it in a sum, rank 1 for the next order."""
    group = DistributedGroup(rank, size, rendezvous)
    group.all_reduce(torch.zeros(4))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.broadcast(None) if rank == 1 else group.all_reduce(torch.zeros(4))
    except ReplicaError as error:
        return f"ReplicaError: {error}"
    return "nothing was noticed"


def _wait_for_a_rank_that_is_busy(rank: int, size: int, rendezvous: str) -> str:
    """Rank 1 never joins the sum, but awaits orders, which may take long."""
    group = DistributedGroup(rank, size, rendezvous, data_timeout_s=0.5)
    if rank == 1:
        return str(group.broadcast(None).tolist())
    with pytest.raises(ReplicaError):
        group.all_reduce(torch.zeros(4))
    group.broadcast(np.array([7]))
    group.close()
    return "gave up"


def _join_alone(rank: int, size: int, rendezvous: str) -> str:
    with pytest.raises(ReplicaError, match="could not join"):
        DistributedGroup(0, 2, rendezvous, start_timeout_s=0.5)
    return "gave up"


@pytest.mark.slow
def test_processes_sum_gather_and_obey():
    for result in run_processes(3, _exchange):
        assert result["sum"] == [1.0, 3.0]
        assert result["half_sum"] == torch.bfloat16
        assert result["gathered"] == [0.0, 1.0, 2.0]
        assert result["strided"] == (12, 1)
        assert result["lengths"] == [3, 3 * FIRST_PART, FIRST_PART - 1, FIRST_PART, 0]


@pytest.mark.slow
def test_a_killed_process_is_heard_of_by_all_others():
    leader, follower, killed = run_processes(3, _lose_rank_two, timeout_s=30)
    assert leader.startswith("ReplicaError: a rank of the replica was lost")
    assert follower.startswith("ReplicaError: a rank of the replica was lost")
    assert killed == f"exit code {-signal.SIGKILL}"


@pytest.mark.slow
def test_sums_have_a_deadline_and_orders_have_none():
    assert run_processes(2, _wait_for_a_rank_that_is_busy, timeout_s=30) == ["gave up", "[7]"]


@pytest.mark.slow
def test_a_rank_whose_peers_never_come_gives_up():
    assert run_processes(1, _join_alone, timeout_s=30) == ["gave up"]


def run_processes(size: int, fn: Callable[[int, int, str], Any], timeout_s: float = 60.0) -> list[Any]:
    """`fn(rank, size, rendezvous)` in a process per rank; what each returned, or how it ended, in rank order."""
    context = multiprocessing.get_context("spawn")
    rendezvous = f"tcp://127.0.0.1:{pick_port()}"
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_run, args=(fn, rank, size, rendezvous, pipes[rank][1])) for rank in range(size)
    ]
    for process, (_, writer) in zip(processes, pipes, strict=True):
        process.start()
        writer.close()
    results = [_result(reader, process, timeout_s) for process, (reader, _) in zip(processes, pipes, strict=True)]
    for process in processes:
        process.join()
    return results


def _result(reader: Any, process: Any, timeout_s: float) -> Any:
    if not reader.poll(timeout_s):
        process.kill()
        return "hung"
    try:
        return reader.recv()
    except EOFError:
        process.join()
        return f"exit code {process.exitcode}"


def _run(fn: Callable[[int, int, str], Any], rank: int, size: int, rendezvous: str, writer: Any) -> None:
    torch.set_num_threads(1)
    writer.send(fn(rank, size, rendezvous))
