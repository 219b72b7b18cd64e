"""What ranks share on GPUs: sums in peers' memory, over CUDA's IPC. Each rank sees its own device alone, as Ray has it.

    TRITON_INTERPRET=0 python -m pytest tests/gpu/test_ranks_on_a_device.py

With one GPU all ranks share it: their kernels take turns, which shows logic and bits and no speed.
"""

import multiprocessing
import os
import traceback

import pytest
import torch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("needs a CUDA device, and TRITON_INTERPRET=0", allow_module_level=True)

from tests.worker.executors.gpu.piped_group import PipedGroup, pipes_between

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SPAWN = multiprocessing.get_context("spawn")
COUNTS = (1, 7, 64, 256)
HIDDEN = 4096


def values(rank: int, count: int) -> torch.Tensor:
    """Two slices, of magnitudes so different that another order of adding shows."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    x = torch.randn(2, count, HIDDEN, generator=generator)
    return x * torch.exp2(torch.randint(-12, 12, x.shape, generator=generator).float())


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def run(group: PipedGroup) -> list[object]:
    """Sums launched one by one without a wait, then in a graph that is replayed; and whether they are right."""
    from holdfast.worker.executors.gpu.graphs import Buffers, cuda_capture
    from holdfast.worker.executors.gpu.launches import triton_launch
    from holdfast.worker.executors.gpu.rank_exchange import choose_exchange

    device = torch.device("cuda", 0)
    exchange = choose_exchange(group, max(COUNTS) * HIDDEN, device, triton_launch)
    found: list[object] = [type(exchange).__name__]
    inputs = [values(group.rank, count).to(device) for count in COUNTS]
    rooms = [Buffers(device) for _ in COUNTS]

    def work() -> list[torch.Tensor]:
        return [exchange.add(x, room) for x, room in zip(inputs, rooms, strict=True)]

    sums = work()
    if exchange.on_device:
        graph = cuda_capture(work)
        for each in sums:
            each.zero_()
        for _ in range(100):
            graph.replay()
    torch.cuda.synchronize()
    for count, sum_of_count in zip(COUNTS, sums, strict=True):
        expected = tree([part for rank in range(group.size) for part in values(rank, count)])
        found.append(torch.equal(tree(list(sum_of_count.cpu())), expected))
    return [*found, exchange.lost()]


def main(rank: int, pipes: object, answer: object) -> None:
    try:
        result: object = run(PipedGroup(rank, pipes))
    except BaseException:
        result = traceback.format_exc()
    answer.send(result)


@pytest.mark.parametrize("size", [2, 4])
def test_sums_in_peers_memory_are_those_of_the_tree(size, monkeypatch):
    pipes, answers = pipes_between(size, SPAWN), [SPAWN.Pipe(duplex=False) for _ in range(size)]
    every = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    devices = every.split(",")
    ranks = [
        SPAWN.Process(target=main, args=(rank, pipes[rank], answers[rank][1]), daemon=True) for rank in range(size)
    ]
    for number, rank in enumerate(ranks):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices[number % len(devices)])
        rank.start()
    try:
        found = [answer.recv() for answer, _ in answers]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert found == [["PeerExchange", *[True] * len(COUNTS), None]] * size, found
