"""Exchanges and orders between ranks over sockets: of every size, and between ranks that are out of step."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from holdfast.worker.executors.peer_sockets import LARGEST_BYTES, PeerSockets

TIMEOUT_S = 20
LARGE = 4 * LARGEST_BYTES


def two_ranks(timeout_s: float = TIMEOUT_S) -> list[PeerSockets]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    return [PeerSockets({1: ends[0]}, timeout_s), PeerSockets({0: ends[1]}, timeout_s)]


def heard(rank: PeerSockets, sizes: list[int]) -> list[list[int]] | str:
    """The sums of what each exchange gave, or the error; a rank with an error hangs up, as one that ends does."""
    try:
        return [[int(part.sum()) for part in rank.exchange(torch.ones(size, dtype=torch.uint8))] for size in sizes]
    except OSError as error:
        return str(error)
    finally:
        rank.close()


def both(*sizes: list[int]) -> list[list[list[int]] | str]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(heard, two_ranks(), sizes))


def test_every_size_reaches_the_other_rank():
    sizes = [1, 16, LARGEST_BYTES - 16, LARGEST_BYTES, LARGEST_BYTES + 1, LARGE, 1]
    assert both(sizes, sizes) == [[[size, size] for size in sizes]] * 2


@pytest.mark.parametrize(
    ("first", "second"),
    [(8, 1), (1, 8), (8, LARGE), (LARGE, 8), (LARGE, LARGE + 1), (LARGEST_BYTES, LARGEST_BYTES + 1)],
)
def test_exchanges_of_different_sizes_give_an_error_and_no_values(first, second):
    results = both([4, first], [4, second])
    assert all(isinstance(result, str) for result in results), results
    assert any("out of step" in result and "exchange 2 of" in result for result in results), results


@pytest.mark.parametrize("size", [8, LARGE])
def test_a_rank_that_has_missed_an_exchange_gives_an_error(size):
    ranks = two_ranks()
    ranks[1]._number += 1
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(heard, ranks, [[size], [size]]))
    assert any("at exchange 2 of" in result or "at exchange 1 of" in result for result in results), results


def order_of(rank: PeerSockets) -> list[int] | str:
    try:
        return rank.receive().tolist()
    except OSError as error:
        return str(error)
    finally:
        rank.close()


def exchanged(rank: PeerSockets, size: int) -> None:
    rank.exchange(torch.zeros(size, dtype=torch.uint8))


@pytest.mark.parametrize("size", [0, 1, LARGE])
def test_orders_and_exchanges_share_a_connection(size):
    leader, other = two_ranks()
    order = np.arange(size)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            sent = pool.submit(leader.send, order)
            assert np.array_equal(other.receive(), order)
            sent.result(TIMEOUT_S)
            list(pool.map(exchanged, (leader, other), (8, 8)))


def test_a_sum_is_not_taken_for_an_order_nor_an_order_for_a_sum():
    leader, other = two_ranks()
    with ThreadPoolExecutor(2) as pool:
        summed, obeyed = pool.submit(heard, leader, [8]), pool.submit(order_of, other)
        assert "rank 0 is at exchange 1 of 8 bytes, this rank at order 1 of 8 bytes" in obeyed.result(TIMEOUT_S)
        assert isinstance(summed.result(TIMEOUT_S), str)
    leader, other = two_ranks()
    leader.send(np.arange(1))
    assert "rank 0 is at order 1 of 8 bytes, this rank at exchange 1 of 8 bytes" in heard(other, [8])


def test_a_rank_that_has_missed_an_order_obeys_no_later_one():
    leader, other = two_ranks()
    leader._number += 1
    leader.send(np.arange(3))
    assert "rank 0 is at order 2 of 24 bytes, this rank at order 1 of 24 bytes" in order_of(other)


class Impatient:
    """A connection that says when a call has reached its timeout."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.timed_out = threading.Event()

    def recv_into(self, buffer: memoryview, count: int = 0, flags: int = 0) -> int:
        try:
            return self._connection.recv_into(buffer, count, flags)
        except BlockingIOError:
            if not flags:
                self.timed_out.set()
            raise


def test_an_order_may_take_longer_than_a_sum():
    leader, other = two_ranks(timeout_s=0.01)
    waiting = other._peers[0] = Impatient(other._peers[0])
    with ThreadPoolExecutor(1) as pool:
        order = pool.submit(other.receive)
        assert waiting.timed_out.wait(TIMEOUT_S)
        leader.send(np.arange(3))
        assert order.result(TIMEOUT_S).tolist() == [0, 1, 2]
