"""Exchanges between ranks over sockets: of every size, and between ranks that are out of step."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from holdfast.worker.distributed.peer_sockets import LARGEST_BYTES, PeerSockets

TIMEOUT_S = 20
LARGE = 4 * LARGEST_BYTES


def two_ranks() -> list[PeerSockets]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    return [PeerSockets({1: ends[0]}, TIMEOUT_S), PeerSockets({0: ends[1]}, TIMEOUT_S)]


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
