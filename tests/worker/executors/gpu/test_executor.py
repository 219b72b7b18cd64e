"""The GPU executor runs whole models as the reference does, and a row's bits depend on nothing around it."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from benchmarks.own_pool_sampler import OwnPoolSampler
from holdfast.worker.executors.gpu.executor import NUMERICS, GpuExecutor
from holdfast.worker.executors.gpu.graphs import bucket_of
from holdfast.worker.executors.gpu.weights import DeviceWeights, unfit
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models import native_backend as backend
from holdfast.worker.models.reference import Reference
from holdfast.worker.step_plan import BlockCopy
from tests.draw_params import draw_params
from tests.worker.executors import models
from tests.worker.executors.cpu.runs import layout_of, tokens
from tests.worker.executors.gpu import runs
from tests.worker.executors.models import MODELS, config_of, expected_logits, on_ranks
from tests.worker.executors.steps import Part, batch_of

BF16, F32 = torch.bfloat16, torch.float32
Runner = partial(runs.Runner, launch=launch)


class FakeGraph:
    """Work that is done again at each replay."""

    def __init__(self, work):
        self.replay = work


class FakeDevice:
    """Captures nothing, and counts."""

    def __init__(self):
        self.captures = 0

    def __call__(self, work):
        self.captures += 1
        return FakeGraph(work)


def size_of(x):
    return x.square().mean(1).sqrt().median().item()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("model", MODELS)
def test_a_family_is_computed_as_the_reference_does(model, dtype):
    """In one piece and in chunks: equal bits."""
    layout = layout_of(model, dtype)
    if reason := unfit(layout, 1, 16):
        pytest.skip(reason)
    ids = tokens(40)
    exact = Reference(layout, dtype=torch.float64).run_model(torch.tensor(ids))
    rounded = Reference(layout, rounds=True).run_model(torch.tensor(ids))
    runner = Runner(layout, block_size=16)
    logits = runner.run(ids)
    error, rounding, size = (size_of(x) for x in (logits.double() - exact, rounded.double() - exact, exact))
    assert error <= (1e-5 * size if dtype == F32 else 1.5 * rounding), (error, rounding, size)
    assert torch.equal(runner.run(ids, (33, 1, 6)), logits)


MIXTURES = ("gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", *MIXTURES])
def test_greedy_tokens_are_those_of_hugging_face(model):
    config = config_of(model)
    layout = models.layout_of(config)
    runner, ids = Runner(layout), tokens(10)
    blocks = runner.blocks(30)
    ours, place, step = [], 0, ids
    for _ in range(20):
        ours.append(runner.best(Part(place, step, blocks))[-1])
        place, step = place + len(step), ours[-1:]
    theirs = expected_logits(config, torch.tensor(ids + ours[:-1])).argmax(-1)[len(ids) - 1 :]
    assert ours == theirs.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "qwen2_moe"])
def test_rows_do_not_depend_on_their_batch_and_graphs_change_nothing(model):
    """Three sequences packed at uneven places; then all decode, padded to a graph's rows. As the reference computes."""
    layout = layout_of(model)
    alone, device = Runner(layout), FakeDevice()
    together = Runner(layout, capture=device)
    ids = [tokens(count, seed) for seed, count in enumerate((4, 7, 2))]
    expected = [alone.run(each) for each in ids]
    exact = Reference(layout, dtype=torch.float64).run_model(torch.tensor(ids[1]))
    rounded = Reference(layout, rounds=True).run_model(torch.tensor(ids[1]))
    assert size_of(expected[1].double() - exact) <= 1.5 * size_of(rounded.double() - exact)
    blocks = [together.blocks(len(each)) for each in ids]
    first = together.step(*(Part(0, each[:-1], table) for each, table in zip(ids, blocks, strict=True)))
    last = [Part(len(each) - 1, each[-1:], table) for each, table in zip(ids, blocks, strict=True)]
    assert together.best(*last) == [int(logits[-1].argmax()) for logits in expected]
    second = together.step(*last)
    for rows, row, logits in zip(first, second, expected, strict=True):
        assert torch.equal(torch.cat((rows, row)), logits)
    together.step(*last)
    assert device.captures == 2, "with logits and without; the third step is a replay"
    assert together.executor.layers_done() == 4 * len(layout.layers), "a step that is captured runs once as well"


@pytest.mark.slow
def test_draws_in_the_step_are_those_from_its_logits():
    """Three sequences that decode, in a graph of four rows: its first replay and one with other draws."""
    device = FakeDevice()
    runner = Runner(layout_of("llama"), capture=device)
    last = [Part(0, [token], runner.blocks(1)) for token in (5, 6, 7)]
    logits = torch.cat(runner.step(*last))
    sampler = OwnPoolSampler.with_threads(1)
    for seed in (1, 2):
        draws = [
            draw_params(seed=seed + row, first_output_index=row, temperature=0.7 * row, top_k=0, top_p=0.9)
            for row in range(3)
        ]
        batch = batch_of(last, runner.block_size)
        batch.draws = lambda given=draws: given
        output = runner.executor.run(batch, with_logits=True)
        assert output.logits is None
        assert output.sampled == sampler.sample(HeadOutput(logits, None), draws)
    assert device.captures == 2, "the logits, and the draws"
    sampler.close()


@pytest.mark.slow
def test_all_graphs_are_captured_at_load():
    """For up to 4 rows: of contexts of up to 1,024, 2,048 and 4,096 tokens, with logits, with draws and without; and
    draws alone, with masks, with log-probabilities and without.
    """
    device = FakeDevice()
    runner = Runner(layout_of("llama"), capture=device)
    runner.executor.warm_up(3)
    assert device.captures == 3 * 3 * 3 + 3 * 3
    blocks = runner.blocks(100)
    for position in (0, 70):
        runner.best(*(Part(position, [5], blocks) for _ in range(3)))
    assert device.captures == 3 * 3 * 3 + 3 * 3
    assert not runner.cache.layers[0].keys[0].any()


def test_steps_that_decode_are_padded_to_few_sizes():
    assert [bucket_of(count) for count in (1, 3, 9, 256, 257)] == [1, 4, 16, 256, None]


@pytest.mark.slow
def test_blocks_are_copied_before_a_step():
    layout, ids = layout_of("llama"), tokens(20)
    runner = Runner(layout, block_size=16)
    blocks, others = runner.blocks(20), runner.blocks(20)
    runner.step(Part(0, ids[:19], blocks))
    copies = tuple(
        BlockCopy(source=source, destination=to, num_tokens=count)
        for source, to, count in zip(blocks, others, (16, 3), strict=True)
    )
    (after,) = runner.step(Part(19, ids[19:], others), copies=copies)
    assert torch.equal(after, runner.run(ids)[-1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "size"),
    [("llama", 2), ("llama", 4), ("gemma2", 2), ("gemma2", 4), ("mixtral", 2), ("qwen2_moe", 4), ("gpt_oss", 2)],
)
def test_ranks_give_the_bits_of_one(model, size):
    """8 heads, so that slices are whole at each size."""
    config = config_of(model, num_attention_heads=8, num_key_value_heads=4)
    ids = tokens(20)

    def run(group):
        layout = models.layout_of(config, group, BF16)
        runner = Runner(layout, group=group)
        logits = runner.run(ids, (12, 8))
        best = runner.best(Part(0, ids, runner.blocks(20)))
        return logits, best

    ((alone, best),) = on_ranks(1, run)
    for rank, (logits, tokens_of_rank) in enumerate(on_ranks(size, run)):
        assert torch.equal(logits, alone) if rank == 0 else logits.numel() == 0
        assert tokens_of_rank == best


@pytest.mark.slow
def test_a_model_is_read_on_the_cpu_and_proved_on_its_device(monkeypatch):
    """As at load on a GPU, with the interpreter in its place."""
    cuda, group = torch.device("cuda", 0), SingleRank()

    def interpreted(layout, group, max_positions, device):
        assert device == cuda
        cpu = torch.device("cpu")
        return GpuExecutor(layout, group, max_positions=max_positions, device=cpu, launch=launch), NUMERICS

    monkeypatch.setattr(backend, "_executor", interpreted)
    sizes = {"max_model_len": 64, "block_size": 16, "device": cuda}
    gemma = models.prepared(layout_of("gemma2"), group, **sizes)
    made = backend.make_backend(gemma, group, **sizes)
    assert isinstance(made, backend.NativeBackend), made
    assert made.numerics == "gpu-native-1"
    assert made.kv_bytes_per_token > 0
    mixture = models.prepared(layout_of("mixtral"), group, **sizes)
    assert isinstance(backend.make_backend(mixture, group, **sizes), backend.NativeBackend)


def test_sums_that_are_no_power_of_two_slices_are_taken_in_one():
    """3 heads and 96 features, as 9 and 1,536 of SmolLM2: kernels add 1, 2, 4 or 8 slices."""
    config = config_of("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48, intermediate_size=96)
    layout = models.layout_of(config)
    assert layout.layers[0].mlp.num_slices == 3
    layer = DeviceWeights(layout, torch.device("cpu"), 8).layout.layers[0]
    assert (layer.attention.num_slices, layer.mlp.num_slices) == (1, 1)


def test_what_does_not_fit_is_refused():
    mixture = layout_of("qwen2_moe")
    assert unfit(mixture, 1, 16) is None
    shared = replace(mixture.layers[0].mlp.shared, num_slices=1)
    layer = replace(mixture.layers[0], mlp=replace(mixture.layers[0].mlp, shared=shared))
    assert "other slices" in unfit(replace(mixture, layers=(layer,)), 1, 16)
    assert "blocks of 48" in unfit(layout_of("llama"), 1, 48)
    assert "3 ranks" in unfit(layout_of("llama"), 3, 16)


@pytest.mark.slow
def test_a_step_larger_than_the_buffers_makes_new_ones():
    layout, ids = layout_of("llama"), tokens(300)
    runner = Runner(layout)
    batch = batch_of([Part(0, ids, runner.blocks(300))], 32)
    assert len(runner.executor.run(batch, with_logits=False).best) == 300
