"""Sums over ranks in peers' memory have the bits of the tree, step after step, and end when a rank does not come."""

import gc
import threading

import pytest
import torch

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.executors.gpu import rank_exchange as choose_exchange
from holdfast.worker.executors.gpu.graphs import Buffers
from holdfast.worker.executors.gpu.kernels import ranks
from holdfast.worker.executors.gpu.launches import Launches
from holdfast.worker.executors.gpu.peer_memory import PeerMemory
from holdfast.worker.executors.gpu.rank_exchange import (
    FLAGS,
    POLL_S,
    SCATTERED,
    GroupExchange,
    PeerExchange,
    share_words,
)
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models import roofline
from tests.worker.executors.gpu.forked_ranks import fork_ranks, read_late

LOOK_EVERY = ranks.LOOK_EVERY.value
CPU = torch.device("cpu")
SLOT = 4096
SIZES = (1, 1023, 1024, 1025, 3000, 4096, 7, 2048)


def values(rank: int, turn: int, size: int, slices: int = 1) -> torch.Tensor:
    """Of magnitudes so different that another order of adding shows."""
    generator = torch.Generator().manual_seed(1000 * rank + turn)
    x = torch.randn(slices, size, generator=generator)
    return x * torch.exp2(torch.randint(-12, 12, x.shape, generator=generator).float())


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def peers(group, slot_words: int = SLOT, scatters_from: int | None = None, **changes) -> PeerExchange:
    others = GroupExchange(group, Launches(launch))
    for name, value in changes.items():
        setattr(group, name, value)
    memory = group.share(group, share_words(slot_words), CPU)
    return PeerExchange(memory, group, slot_words, others, CPU, launch, scatters_from)


@pytest.mark.parametrize("size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 8))])
def test_sums_of_any_size_are_those_of_the_tree_step_after_step(size):
    """Nothing but the sums makes a rank wait: one that is ahead would overwrite what another still reads."""
    slices = 8 // size

    def work(group):
        if group.rank == size - 1:
            read_late()
        exchange, buffers = peers(group), Buffers(CPU)
        return [
            exchange.add(values(group.rank, turn, count, slices)[:, None], buffers).clone()
            for turn, count in enumerate(SIZES * 2)
        ]

    found = fork_ranks(size, work)
    for turn, count in enumerate(SIZES * 2):
        parts = [part for rank in range(size) for part in values(rank, turn, count, slices)]
        for sums in found:
            assert torch.equal(sums[turn].flatten(), tree(parts)), (turn, count)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_that_are_scattered_have_the_same_bits(size):
    """Blocks of several rounds and one that is not whole; between sums that are not scattered, and other exchanges."""
    sizes = (3000, (66 if size > 2 else 9) * 1024 + 500, 1500, 2000)

    def work(group):
        if group.rank == size - 1:
            read_late()
        exchange, buffers = peers(group, 68 * 1024, 2000), Buffers(CPU)
        sums = []
        for turn, count in enumerate(sizes):
            sums.append(exchange.add(values(group.rank, turn, count, 2)[:, None], buffers).clone())
            exchange.take_from_leader(torch.zeros(5, dtype=torch.int32))
        return sums

    for sums in fork_ranks(size, work, share_words=share_words(68 * 1024)):
        for turn, count in enumerate(sizes):
            parts = [part for rank in range(size) for part in values(rank, turn, count, 2)]
            assert torch.equal(sums[turn].flatten(), tree(parts)), (turn, count)


def test_the_roofline_knows_which_sums_are_scattered():
    assert roofline.SCATTERED == SCATTERED


def test_epochs_go_on_beyond_the_largest_number():
    def work(group):
        if group.rank == 1:
            read_late()
        exchange, buffers = peers(group), Buffers(CPU)
        start = 2**31 - 3  # as if so many sums had been taken
        exchange._shared["epochs"].fill_(start)
        group.shares[group.rank][:FLAGS] = start
        group.all_gather(torch.zeros(1))  # all have set their flags back
        return [exchange.add(values(group.rank, turn, 2000)[:, None], buffers).clone() for turn in range(6)]

    for sums in fork_ranks(2, work):
        for turn, found in enumerate(sums):
            assert torch.equal(found.flatten(), tree([values(rank, turn, 2000)[0] for rank in range(2)]))


def test_values_are_gathered_and_words_are_the_leaders():
    """In one piece, and in pieces of a slot; a sum in place, and sums that are larger than a slot, by the group."""

    def work(group):
        exchange, buffers = peers(group), Buffers(CPU)
        x = values(group.rank, 0, 20 * 900)[0].view(20, 900)
        summed, large = x[:2].clone(), x.clone()
        exchange.add_in_place(summed)
        exchange.add_in_place(large)
        parts = exchange.add(x[None], buffers)
        words = torch.arange(1500, dtype=torch.int32) * (1 + group.rank)
        exchange.take_from_leader(words)
        few = exchange.gather(x[:3], "x", buffers).clone()
        whole = exchange.gather(x, "y", buffers).clone()
        return summed, large, len(parts), words, few, whole, exchange.gather_to_leader(x, buffers)

    every = [values(rank, 0, 20 * 900)[0].view(20, 900) for rank in range(2)]
    for rank, (summed, large, num_parts, words, few, whole, logits) in enumerate(fork_ranks(2, work)):
        assert torch.equal(summed, tree([x[:2] for x in every]))
        assert torch.equal(large, tree(every))
        assert num_parts == 2
        assert torch.equal(words, torch.arange(1500, dtype=torch.int32))
        assert torch.equal(few, torch.stack([x[:3] for x in every]))
        assert torch.equal(whole, torch.stack(every))
        assert (logits is None) == (rank > 0)
        if logits is not None:
            assert torch.equal(logits, torch.cat(every, 1))


def test_a_rank_that_stops_ends_the_wait_of_the_others():
    """After some polls; the sums that follow do not wait as long again, and what the host has said is kept."""

    def work(group):
        exchange, buffers = peers(group, data_timeout_s=POLL_S * (LOOK_EVERY + 10)), Buffers(CPU)
        x = torch.ones(1, 1, 100)
        for _ in range(2):
            exchange.add(x, buffers)
        if group.rank == 1:
            return None
        exchange.add(x, buffers)
        lost = exchange.lost()
        exchange.give_up()
        exchange.add(x, buffers)
        return lost, exchange.lost()

    (lost, after), _ = fork_ranks(2, work)
    assert lost == "rank 1 did not join a sum in time"
    assert after == "the wait was cancelled"


def test_the_host_ends_a_wait():
    """From another thread, as when a replica has failed: long before the last poll."""

    def work(group):
        if group.rank == 1:
            return None
        exchange = peers(group, data_timeout_s=1e9)
        ender = threading.Timer(0.3, exchange.give_up)
        ender.start()
        exchange.add(torch.ones(1, 1, 100), Buffers(CPU))
        return exchange.lost()

    assert fork_ranks(2, work) == ["the wait was cancelled", None]


@pytest.mark.parametrize("closes", [True, False])
def test_shares_are_given_back_once_also_by_an_exchange_that_is_dropped(closes):
    """As by a model in a process that goes on without it."""
    released, group = [], SingleRank()
    others = GroupExchange(group, Launches(launch))
    memory = PeerMemory((0,), release=lambda: released.append(True))
    exchange = PeerExchange(memory, group, SLOT, others, CPU, launch)
    if closes:
        exchange.close()
        exchange.close()
    del exchange
    gc.collect()
    assert released == [True]


def chosen(group, share, launch=launch):
    with pytest.MonkeyPatch.context() as patch:
        heard = []
        for name in ("info", "warning"):
            patch.setattr(choose_exchange.logger, name, lambda text, *values: heard.append(text % values))
        exchange = choose_exchange.choose_exchange(group, 1500, CPU, launch, share)
    return type(exchange).__name__, heard


def test_peers_memory_serves_where_its_bits_are_right():
    found = fork_ranks(2, lambda group: chosen(group, group.share))
    assert found == [("PeerExchange", ["sums over 2 ranks are taken by kernels in peers' memory"])] * 2


def test_ranks_without_a_common_memory_gather():
    found = fork_ranks(2, lambda group: chosen(group, lambda *_: "the devices are of two hosts"))
    text = "sums over ranks are gathered by the group, outside graphs: the devices are of two hosts"
    assert found == [("GroupExchange", [text])] * 2


def test_a_sum_with_other_bits_on_one_rank_is_not_used_on_any():
    """As if the memory of a peer were not coherent."""

    def work(group):
        def wrong(kernel, grid, arguments, **sizes):
            launch(kernel, grid, arguments, **sizes)
            if group.rank == 1 and kernel.fn.__name__ == "add_over_ranks":
                out = arguments["out"].view(-1)
                out[-1] = torch.nextafter(out[-1], torch.tensor(torch.inf))

        return chosen(group, group.share, wrong)

    (first, (message,)), (second, (reason,)) = fork_ranks(2, work)
    assert first == second == "GroupExchange"
    assert message.endswith("another rank has found a difference")
    assert reason.endswith("sums in peers' memory are not those of the group")
