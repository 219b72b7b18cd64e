"""A whole step without a device: what it launches, that it makes no tensor, waits for nothing and mixes no devices.

Tensors of the `meta` device have no memory: reading one's value on the host raises, and so does mixing it with others.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from holdfast.worker.executors.adapters import AdaptedLinear, LowRank, StoredMatrix
from holdfast.worker.executors.gpu import executor as executor_module
from holdfast.worker.executors.gpu.adapter_launches import adapter_sites
from holdfast.worker.executors.gpu.adapter_packing import DeviceAdapter
from holdfast.worker.executors.gpu.executor import GpuExecutor
from holdfast.worker.executors.gpu.peer_memory import PeerMemory
from holdfast.worker.executors.gpu.rank_exchange import NoExchange, PeerExchange
from holdfast.worker.executors.tensor_parallel import SingleRank
from scripts.gpu_shapes import Shape, decode_batch, drawn_rows, layout_of, prompt_batch

LAYERS = 3
META = torch.device("meta")
VIEWS = {"slice", "view", "select", "unsqueeze", "detach", "alias", "_unsafe_view"}


class Operations(TorchDispatchMode):
    """Torch's operations while it is active, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Device:
    """Launches nothing, and counts. What kernels are given lies on the device, but for the counter of progress and what
    is lost.
    """

    def __init__(self):
        self.launches = Counter()
        self.variants = set()
        """What is compiled: kernels by name and by what Triton takes for constants."""

    def __call__(self, kernel, grid, arguments, *, num_warps, num_stages):
        assert all(size > 0 for size in grid)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                assert value.device == META or name in ("progress", "lost"), name
        self.launches[kernel.fn.__name__] += 1
        self.variants.add((kernel.fn.__name__, *constants(arguments)))


def constants(arguments):
    """Constants by their names; of other integers, but for counts of rows, whether they are 1 or multiples of 16."""
    for name, value in arguments.items():
        if name.isupper():
            yield name, value
        elif isinstance(value, int) and name not in ("num_rows", "num_chosen", "num_tiles"):
            yield name, value == 1, value % 16 == 0


def executor(capture=None, in_fp8=False, **more):
    device = Device()
    shape = Shape(hidden=256, inner=512, num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=1000, **more)
    made = GpuExecutor(
        layout_of(shape, LAYERS), SingleRank(), max_positions=8192, device=META, launch=device, capture=capture
    )
    if in_fp8:
        made.keep_kv_in_code()
    made.allocate_cache(16, 64)
    return made, device


BATCHES = {"decode": decode_batch(32), "few that decode": decode_batch(2), "prompt": prompt_batch(200)}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("with_logits", "in_fp8"), [(True, False), (False, False), (False, True)])
def test_a_step_launches_nine_kernels_a_layer_and_makes_no_tensor(name, with_logits, in_fp8):
    """A small batch with a long context has a tenth, which merges the splits of its attention. Fp8 adds none."""
    made, device = executor(in_fp8=in_fp8)
    for batch in [*BATCHES.values()] * 2:  # buffers are made, for two steps in turn
        made.launch(batch, with_logits=with_logits)
    device.launches.clear()
    with Operations() as operations:
        made.launch(BATCHES[name], with_logits=with_logits)
    assert set(operations.names) <= VIEWS | {"copy_"}, operations.names
    assert operations.names["copy_"] == 1 + (not with_logits), "the step's arrays, and the tokens' way back"
    merged = LAYERS if name == "few that decode" or name == "decode" else 0
    assert sum(device.launches.values()) == 9 * LAYERS + merged + 3 + 2 * (not with_logits), device.launches


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("shared_inner", [0, 128])
def test_a_mixture_launches_four_kernels_more_and_makes_no_tensor(name, shared_inner):
    """For any number of experts and rows: the router, the choice, the grouping, and the sum of experts. The expert that
    all rows go through takes three.
    """
    made, device = executor(num_experts=64, top_k=6, shared_inner=shared_inner)
    for batch in [*BATCHES.values()] * 2:  # buffers are made, for two steps in turn
        made.launch(batch, with_logits=False)
    device.launches.clear()
    with Operations() as operations:
        made.launch(BATCHES[name], with_logits=False)
    assert set(operations.names) <= VIEWS | {"copy_"}, operations.names
    merged = device.launches["merge_splits"]
    assert sum(device.launches.values()) == (13 + 3 * bool(shared_inner)) * LAYERS + merged + 5, device.launches
    assert device.launches["grouped_linear"] == 2 * LAYERS


def with_adapter(made):
    """The executor with an adapter of all linears in its first slot, and the same of its proof's results."""
    made.allocate_adapters(2)
    matrix = StoredMatrix(torch.bfloat16, (0, 0), 0)
    adapted = {
        place: AdaptedLinear(
            parts=(LowRank(a=matrix._replace(shape=(8, 0)), b=matrix, scale=1.0),),
            part_of=np.zeros(site.num_outputs, dtype=np.int64),
            rows=np.arange(site.num_outputs),
            columns=np.arange(site.num_inputs),
            probe=torch.zeros(site.num_inputs),
        )
        for place, site in adapter_sites(made._layout).items()
    }
    adapter = DeviceAdapter.__new__(DeviceAdapter)
    adapter.places = made.plan_adapter(adapted).places
    adapter.records = np.zeros((len(adapted), 9), dtype=np.int64)
    made.put_adapter(1, adapter)
    return made


@pytest.mark.parametrize("name", BATCHES)
def test_adapters_launch_two_kernels_for_a_linear_and_make_no_tensor(name):
    """And two for the embedding, and one for each grouping of rows. Steps without adapters launch none of them."""
    made, device = executor()
    with_adapter(made)
    adapted = {each: replace(batch, adapter_slots=np.ones_like(batch.num_tokens)) for each, batch in BATCHES.items()}
    for batch in [*BATCHES.values(), *adapted.values()] * 2:
        made.launch(batch, with_logits=True)
    device.launches.clear()
    made.launch(BATCHES[name], with_logits=True)
    plain = device.launches.copy()
    device.launches.clear()
    with Operations() as operations:
        made.launch(adapted[name], with_logits=True)
    assert set(operations.names) <= VIEWS | {"copy_"}, operations.names
    assert operations.names["copy_"] == 2, "the step's arrays, and the slots"
    linears = 4 * LAYERS + 1
    assert device.launches - plain == {"shrink": linears, "look_up": 1, "expand": linears + 1, "group_rows": 2}
    assert not plain - device.launches


MIXTURE_KERNELS = {"choose_experts", "group_rows", "grouped_linear", "add_experts"}


def test_no_number_of_rows_compiles_a_kernel_of_a_mixture_after_load():
    made, device = executor(num_experts=64, top_k=6, shared_inner=128)
    made.warm_up(8)
    warm = {variant for variant in device.variants if variant[0] in MIXTURE_KERNELS}
    assert len({variant for variant in warm if variant[0] == "grouped_linear"}) == 2 * 4, "each tile, for both linears"
    for count in (20, 130, 300, 600, 1500):
        made.launch(prompt_batch(count), with_logits=False)
    assert {variant for variant in device.variants if variant[0] in MIXTURE_KERNELS} == warm


def test_tokens_of_the_step_before_are_put_in_by_one_kernel():
    made, device = executor()
    before = BATCHES["decode"]
    after = replace(before, token_ids=-1 - np.arange(len(before.token_ids)))
    for batch in (before, after, after):  # buffers are made, for two steps in turn
        made.launch(batch, with_logits=False)
    device.launches.clear()
    with Operations() as operations:
        made.launch(after, with_logits=False)
    assert set(operations.names) <= VIEWS | {"copy_"}, operations.names
    assert device.launches["put_in"] == 1
    made.launch(before, with_logits=True)
    with pytest.raises(AssertionError, match="drew no tokens"):
        made.launch(after, with_logits=False)


KINDS = ("plain", "log-probabilities", "penalties", "masks")
LAUNCHES_OF_DRAWS = {"plain": 4, "log-probabilities": 6, "penalties": 6, "masks": 6}
COPIES_OF_DRAWS = {"plain": 2, "log-probabilities": 2, "penalties": 4, "masks": 5}


@pytest.mark.parametrize("kind", KINDS)
def test_draws_launch_as_many_kernels_for_many_rows_and_make_no_tensor(kind):
    """What is copied: records, edits, their tokens and masks to the device, and what was drawn back."""
    made, device = executor()
    sampler, (draws, masks) = made.make_sampler(), drawn_rows()[KINDS.index(kind)]
    logits = made.collect(made.launch(decode_batch(64), with_logits=True)).logits
    for _ in range(2):
        sampler.launch(logits, draws * 32, masks)  # buffers are made, for two steps in turn
    device.launches.clear()
    with Operations() as operations:
        drawing = sampler.launch(logits, draws * 31, masks)
    assert set(operations.names) <= VIEWS | {"copy_"}, operations.names
    assert operations.names["copy_"] == COPIES_OF_DRAWS[kind]
    assert sum(device.launches.values()) == LAUNCHES_OF_DRAWS[kind], device.launches
    with pytest.raises((RuntimeError, NotImplementedError, TypeError), match="meta"):
        sampler.collect(drawing)


class Graphs:
    """Captures work and counts; a replay launches nothing more."""

    def __init__(self):
        self.captures = self.replays = 0

    def __call__(self, work):
        self.captures += 1
        work()
        return self

    def replay(self):
        self.replays += 1


def test_a_step_with_temperatures_is_one_graph_and_three_copies():
    """The step's arrays, the records, and the tokens back."""
    graphs = Graphs()
    made, device = executor(capture=graphs)
    batch, (draws, _) = decode_batch(30), drawn_rows()[0]
    batch.draws = lambda: draws * 15
    for _ in range(2):
        made.launch(batch, with_logits=True)
    device.launches.clear()
    with Operations() as operations:
        launched = made.launch(batch, with_logits=True)
    assert not device.launches
    assert set(operations.names) <= VIEWS | {"copy_"}, operations.names
    assert (operations.names["copy_"], graphs.captures, graphs.replays) == (3, 1, 2)
    with pytest.raises((RuntimeError, NotImplementedError, TypeError), match="meta"):
        made.collect(launched)


def ranks_executor(monkeypatch, rank, capture=None):
    """One of two ranks that share memory; the other one says what this one does."""
    group = SingleRank()
    group.rank, group.size = rank, 2
    launched = Device()
    exchange = PeerExchange(PeerMemory((0, 0)), group, 1 << 21, NoExchange(), META, launched)
    monkeypatch.setattr(executor_module, "choose_exchange", lambda *arguments: exchange)
    shape = Shape(hidden=256, inner=512, num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=1000)
    made = GpuExecutor(
        layout_of(shape, LAYERS), group, max_positions=8192, device=META, launch=launched, capture=capture
    )
    made.allocate_cache(16, 64)
    return made, launched


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("with_logits", [True, False])
def test_ranks_add_two_kernels_a_layer_and_wait_for_nothing(monkeypatch, rank, with_logits):
    """And one for the embedding, one for the logits or two for the best tokens. Nothing is a collective of the host."""
    made, device = ranks_executor(monkeypatch, rank)
    for batch in [*BATCHES.values()] * 2:
        made.launch(batch, with_logits=with_logits)
    device.launches.clear()
    with Operations() as operations:
        made.launch(BATCHES["decode"], with_logits=with_logits)
    assert set(operations.names) <= VIEWS | {"copy_"}, operations.names
    assert device.launches["add_over_ranks"] == 2 * LAYERS + 1
    assert device.launches["gather_over_ranks"] == (1 if with_logits else 2)
    assert sum(device.launches.values()) == 12 * LAYERS + 3 + 2 + 3 * (not with_logits), device.launches


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_of_ranks_is_a_graph_and_its_drawn_tokens_come_from_the_leader(monkeypatch, rank):
    """The leader draws in a graph of its own, which changes nothing of the step's."""
    graphs = Graphs()
    made, device = ranks_executor(monkeypatch, rank, graphs)
    assert made.overlaps
    batch, (draws, _) = decode_batch(30), drawn_rows()[0]
    batch.draws = lambda: draws * 15
    after = replace(batch, token_ids=-1 - np.arange(30))
    for step in (batch, after, after):
        launched = made.launch(step, with_logits=True)
        logits = made.logits_to_draw_from(launched)
        assert (logits is None) == (rank > 0)
        if logits is not None:
            made.make_sampler().launch(logits, draws * 15)
    device.launches.clear()
    with Operations() as operations:
        made.launch(after, with_logits=True)
    assert set(operations.names) <= VIEWS | {"copy_"}, operations.names
    assert device.launches == {"take_from_leader": 1, "put_in": 1}
    assert graphs.captures == (2 if rank == 0 else 1)


def test_draws_are_made_ready_at_load():
    """Then the first requests make no buffer."""
    made, device = executor()
    made.warm_up(8)
    assert {"edit_rows", "tell", "settle_races"} <= set(device.launches)
    logits = made.collect(made.launch(decode_batch(8), with_logits=True)).logits
    with Operations() as operations:
        for draws, masks in drawn_rows():
            made.make_sampler().launch(logits, draws * 4, masks)
    assert set(operations.names) <= VIEWS | {"copy_"}, operations.names


def test_reading_a_value_on_the_host_would_be_seen():
    made, _ = executor()
    launched = made.launch(BATCHES["decode"], with_logits=False)
    with pytest.raises((RuntimeError, NotImplementedError, TypeError), match="meta"):
        made.collect(launched)
