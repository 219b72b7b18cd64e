"""Sums in rank order, orders of any length, a lost rank heard of at once: among threads and among real processes."""

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.free_port import pick_port
from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.peer_sockets import LARGEST_BYTES
from holdfast.worker.executors.rendezvous import Rendezvous
from holdfast.worker.executors.tensor_parallel import DistributedGroup, SingleRank, ordered_sum
from tests.fake_group import run_ranks
from tests.worker.executors.lives import lives_of


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


# Real processes: the same three live through one group after another. What each returns comes back to the test.


def _exchange(rank: int, rendezvous: Rendezvous) -> dict[str, Any]:
    group = DistributedGroup(rank, 3, rendezvous)
    x = torch.tensor([[1e8, -1e8, 1.0][rank], float(rank)])
    big = np.arange(200_000) ** 2  # more than the kernel keeps for a rank that is late
    messages = (np.arange(3), big, big[::2], big[:0])
    result = {
        "obeyed": [np.array_equal(group.broadcast(message if rank == 0 else None), message) for message in messages],
        "sum": group.all_reduce(x.clone()).tolist(),
        "large_sum": group.all_reduce(torch.full((LARGEST_BYTES,), float(rank + 1))).unique().tolist(),
        "half_sum": group.all_reduce(x.bfloat16()).dtype,
        "gathered": group.all_gather(x[1:]).tolist(),
        "leader's": None if (together := group.gather(x[1:])) is None else together.tolist(),
        "strided": group.all_gather(x.repeat(4).view(4, 2)[:, 1:], dim=0).shape,
    }
    group.close()
    return result


def _be_late(rank: int, rendezvous: Rendezvous) -> str:
    """Ranks 1 and 2 never join the leader's sum, and stay until it has given up."""
    group = DistributedGroup(rank, 3, rendezvous, data_timeout_s=0.5)
    if rank == 0:
        heard = _what_is_heard(lambda: group.all_reduce(torch.zeros(4)))
    else:
        heard = "nothing"
        _read_until_it_closes(group._sockets._peers[0])
    group.close()
    return heard


def _read_until_it_closes(connection: socket.socket) -> None:
    while True:
        with suppress(BlockingIOError):  # the limit of a sum
            if not connection.recv(4096):
                return


def _lose_rank_two(rank: int, rendezvous: Rendezvous) -> list[str]:
    """Rank 2 dies while the others wait for it in a sum; then rank 1 awaits orders from a leader that has left."""
    group = DistributedGroup(rank, 3, rendezvous)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    heard = [_what_is_heard(lambda: group.all_reduce(torch.zeros(4)))]
    if rank == 1:
        heard.append(_what_is_heard(lambda: group.broadcast(None)))
    return heard


def _what_is_heard(call: Callable[[], object]) -> str:
    try:
        call()
    except ReplicaError as error:
        return str(error).partition(":")[0]
    return "nothing"


SCENARIOS = (_exchange, _be_late, _lose_rank_two)


@pytest.fixture(scope="module")
def lives() -> list[list[Any]]:
    return lives_of(3, _live, [Rendezvous.at("127.0.0.1", pick_port()) for _ in SCENARIOS])


def _live(rank: int, rendezvous: list[Rendezvous], writer: Connection) -> None:
    torch.set_num_threads(1)
    for scenario, place in zip(SCENARIOS, rendezvous, strict=True):
        writer.send(scenario(rank, place))


@pytest.mark.slow
def test_processes_sum_gather_and_obey(lives):
    for result in (life[0] for life in lives):
        assert result["obeyed"] == [True] * 4
        assert result["sum"] == [1.0, 3.0]
        assert result["large_sum"] == [6.0]
        assert result["half_sum"] == torch.bfloat16
        assert result["gathered"] == [0.0, 1.0, 2.0]
        assert result["leader's"] == ([0.0, 1.0, 2.0] if result is lives[0][0] else None)
        assert result["strided"] == (12, 1)


@pytest.mark.slow
def test_sums_have_a_deadline(lives):
    assert [life[1] for life in lives] == ["a rank of the replica was lost", "nothing", "nothing"]


@pytest.mark.slow
def test_a_killed_process_is_heard_of_by_all_others(lives):
    lost = "a rank of the replica was lost"
    assert [life[2:] for life in lives] == [[[lost], 0], [[lost, lost], 0], [-signal.SIGKILL]]


def test_a_rank_whose_peers_never_come_gives_up():
    with pytest.raises(ReplicaError, match="could not join"):
        DistributedGroup(0, 2, Rendezvous.at("127.0.0.1", pick_port()), start_timeout_s=0.1)
