"""What can only be shown on a GPU: compiled kernels, their bits, and graphs.

    TRITON_INTERPRET=0 python -m pytest tests/gpu

Needs no network and no more than some minutes.
"""

import os

import pytest
import torch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("needs a CUDA device, and TRITON_INTERPRET=0", allow_module_level=True)

from benchmarks.own_pool_sampler import OwnPoolSampler
from holdfast.worker.executors import kv_cache as fp8
from holdfast.worker.executors.gpu.graphs import Buffers, cuda_capture
from holdfast.worker.executors.gpu.launches import AttentionTiles, Launches, SplitSpace, StepTensors
from holdfast.worker.executors.gpu.layers import kv_spec
from holdfast.worker.executors.gpu.linear_tiles import coded_on
from holdfast.worker.executors.gpu.mixtures import DeviceMixtures, MixtureLaunches
from holdfast.worker.executors.gpu.sampler import DeviceSampler
from holdfast.worker.executors.gpu.weights import DeviceMixture, unfit
from holdfast.worker.executors.kv_cache import LayerCache
from holdfast.worker.executors.layout import Activation, Attention
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.models.reference import Reference
from tests.draw_params import changed, draw_params
from tests.worker.executors.cpu.native import library_or_skip
from tests.worker.executors.cpu.runs import layout_of, tokens
from tests.worker.executors.gpu import fp8_kernels
from tests.worker.executors.gpu.cancelling import cancelling_product
from tests.worker.executors.gpu.coded import FORMS, weight_of
from tests.worker.executors.gpu.drawn import FILTERS, edited_batch, made, sampled, seeded
from tests.worker.executors.gpu.runs import Fp8Reference, Runner
from tests.worker.executors.models import MODELS
from tests.worker.executors.steps import Part, batch_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CUDA = torch.device("cuda", 0)
BF16, F32 = torch.bfloat16, torch.float32
COUNTS = (1, 2, 7, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 2048)
SHAPES_OF_8B = ((6144, 4096, 1), (4096, 4096, 8), (28672, 4096, 1), (4096, 14336, 8), (128256, 4096, 1))
"""Outputs, inputs, slices"""


def cancelling(num_rows: int, num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Products that cancel to pure rounding error, so that another order of adding shows in nearly every value."""
    return cancelling_product(num_outputs, num_inputs, num_rows, BF16, CUDA)


@pytest.mark.parametrize(("num_outputs", "num_inputs", "slices"), SHAPES_OF_8B)
def test_a_row_of_a_linear_has_the_same_bits_at_any_number_of_rows(num_outputs, num_inputs, slices):
    launches = Launches()
    x, weight = cancelling(2048, num_outputs, num_inputs)

    def run(rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(slices, len(rows), num_outputs, device=CUDA)
        launches.linear(rows.contiguous(), Linear(weights=(weight,)), out)
        return out

    whole = run(x) if num_outputs < 100_000 else run(x[:512])
    for count in COUNTS:
        if count <= whole.shape[1]:
            first = (whole.shape[1] - count) // 2
            assert torch.equal(run(x[first : first + count]), whole[:, first : first + count]), count


def test_a_linear_is_exact():
    x, weight = (torch.randn(*shape, device=CUDA).to(BF16) for shape in ((200, 4096), (6144, 4096)))
    out = torch.empty(1, 200, 6144, device=CUDA)
    Launches().linear(x, Linear(weights=(weight,)), out)
    torch.testing.assert_close(out[0].double(), x.double() @ weight.double().T, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
@pytest.mark.parametrize("form", FORMS)
def test_a_linear_of_codes_has_the_bits_of_the_dequantized_one(form, dtype):
    """As the interpreter's has: registers and the matrix instruction take the same numbers."""
    weight, launches = weight_of(outputs=300, **FORMS[form]), Launches()
    numbers = weight.to(dtype).to(CUDA)
    coded = coded_on(CUDA, [weight], 1)
    x = torch.randn(2048, numbers.shape[1], device=CUDA).to(dtype)
    for count in COUNTS:
        found, expected = (torch.empty(1, count, 300, device=CUDA) for _ in range(2))
        launches.linear(x[:count], Linear(codes=(coded,)), found)
        launches.linear(x[:count], Linear(weights=(numbers,)), expected)
        assert torch.equal(found, expected), count


@pytest.mark.parametrize(("num_outputs", "num_inputs", "slices"), SHAPES_OF_8B[:4])
@pytest.mark.parametrize("group", [32, 128])
def test_a_large_linear_of_four_bits_has_the_bits_of_the_dequantized_one(num_outputs, num_inputs, slices, group):
    weight, launches = weight_of("int4", num_outputs, num_inputs, group, zeros=group == 128), Launches()
    numbers = weight.to(BF16).to(CUDA)
    coded = coded_on(CUDA, [weight], slices)
    for count in (1, 16, 64, 512):
        x = torch.randn(count, num_inputs, device=CUDA).to(BF16)
        found, expected = (torch.empty(slices, count, num_outputs, device=CUDA) for _ in range(2))
        launches.linear(x, Linear(codes=(coded,)), found)
        launches.linear(x, Linear(weights=(numbers,)), expected)
        assert torch.equal(found, expected), count


@pytest.mark.parametrize(("num_experts", "top_k", "hidden", "inner"), [(128, 8, 2048, 768), (32, 4, 2880, 2880)])
def test_a_row_of_a_mixture_has_the_same_bits_at_any_number_of_rows(num_experts, top_k, hidden, inner):
    """As Qwen3-30B-A3B and gpt-oss-20b have them. Half of the experts are chosen twice as often as the others."""

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=CUDA, dtype=BF16) / shape[-1] ** 0.5

    mixture = DeviceMixture(
        router=Linear(weights=(weight(num_experts, hidden),), bias=torch.arange(num_experts, device=CUDA) % 2 * 0.4),
        num_experts=num_experts,
        top_k=top_k,
        scoring="softmax",
        normalized=True,
        activation=Activation.SILU,
        has_gate=True,
        up=weight(num_experts, 2 * inner, hidden),
        up_bias=None,
        down=weight(num_experts, hidden, inner),
        down_bias=None,
        num_slices=8,
        shared=None,
        has_gate_of_shared=False,
    )
    launches, x = Launches(), weight(2048, hidden) * hidden**0.5

    def run(rows: torch.Tensor, num_padding: int = 0) -> torch.Tensor:
        slots = torch.zeros(len(rows), dtype=torch.int32, device=CUDA)
        slots[len(rows) - num_padding :] = -1
        mixtures = DeviceMixtures(Buffers(CUDA), launches, MixtureLaunches(launches.launch))
        return mixtures.run(mixture, rows.contiguous(), slots)[: len(rows) - num_padding]

    whole = run(x)
    for count in COUNTS:
        first = (len(x) - count) // 2
        assert torch.equal(run(x[first : first + count]), whole[first : first + count]), count
    assert torch.equal(run(x[:40], num_padding=7), whole[:33])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_query_has_the_same_bits_in_any_tile_and_with_any_splits(head_dim):
    """The last 48 queries of 3,000 keys: in wide tiles, in narrow ones, and one by one with splits of their own."""
    launches, nothing = Launches(), Linear(weights=(torch.empty(0, 0),))
    kv_heads, group, first, count, block = 2, 4, 2952, 48, 64
    attention = Attention(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv=nothing,
        rotary=None,
        scaling=head_dim**-0.5,
        output=nothing,
    )
    pools = [torch.randn(48, block, kv_heads, head_dim, device=CUDA).to(BF16) for _ in range(2)]
    pages = LayerCache(kv_spec(attention), *pools)
    queries = torch.randn(count, kv_heads * group * head_dim, device=CUDA).to(BF16)
    table = torch.randperm(48, device=CUDA).int()[None]

    def run(width: int, rows_each: int, rows: slice) -> torch.Tensor:
        some = queries[rows].contiguous()
        starts = range(0, len(some), rows_each)
        tiles = torch.tensor([(at, min(rows_each, len(some) - at), 0) for at in starts], dtype=torch.int32, device=CUDA)
        positions = torch.arange(first, first + count, dtype=torch.int32, device=CUDA)[rows].contiguous()
        step = StepTensors(positions, positions, positions, table, (AttentionTiles(tiles, width, 3),))
        columns = 3 * len(tiles) * kv_heads * width
        space = SplitSpace(*(torch.empty(columns * size, device=CUDA) for size in (head_dim, 1, 1)))
        out = torch.empty_like(some)
        launches.attend(attention, some, pages, step, space, out)
        return out

    everything = slice(0, count)
    expected = run(16, 4, everything)
    if head_dim <= 128:
        assert torch.equal(run(32, 8, everything), expected)
    assert torch.equal(run(16, 1, everything), expected)
    for row in (0, 17, 47):
        assert torch.equal(run(16, 1, slice(row, row + 1)), expected[row : row + 1])


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
def test_rows_in_fp8_have_the_bits_that_the_interpreter_gives_them(dtype):
    """Which are those of the format in plain torch (`tests/worker/executors/gpu/test_fp8.py`): all codes at all scales,
    and rows of all magnitudes, with what is too large, too small and no number.
    """
    numbers = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0)).double()
    limits = torch.finfo(dtype)
    rows = (
        (numbers * torch.logspace(-46, 38, 4096, dtype=torch.float64)[:, None]).clamp(limits.min, limits.max).to(dtype)
    )
    rows[5, 9], rows[77, 0], rows[78] = torch.nan, torch.inf, 0.0
    codes, scales = fp8.encoded(rows)
    found_codes, found_scales = fp8_kernels.encoded(rows.to(CUDA))
    assert torch.equal(found_codes.cpu(), codes)
    assert torch.equal(found_scales.cpu(), scales)
    read = fp8_kernels.decoded(found_codes, found_scales, dtype).cpu()
    torch.testing.assert_close(read, fp8.decoded(codes, scales, dtype), rtol=0, atol=0, equal_nan=True)
    every = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 != 127].expand(247, 254).contiguous()
    powers = torch.arange(247, dtype=torch.uint8)
    read = fp8_kernels.decoded(every.to(CUDA), powers.to(CUDA), dtype).cpu()
    torch.testing.assert_close(read, fp8.decoded(every, powers, dtype), rtol=0, atol=0)
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(1)).int().view(F32)
    of_torch = bits.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    is_number = ~bits.isnan()
    assert torch.equal(fp8_kernels.codes_of(bits.to(CUDA)).cpu()[is_number], of_torch[is_number])


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("model", MODELS)
def test_keys_and_values_in_fp8_are_what_they_should_be_and_rows_do_not_depend_on_chunks(model, dtype):
    """The proof at load: stored bits are the format's, and attention's those of the numbers that they are read as."""
    layout = layout_of(model, dtype)
    if reason := unfit(layout, 1, 32):
        pytest.skip(reason)
    runner, ids = Runner(layout, device=CUDA), tokens(90)
    assert runner.executor.kv_code_difference(batch_of([Part(0, ids[:70], [0, 1, 2])], 32)) is None
    small = Runner(layout, device=CUDA, in_fp8=True)
    logits = small.run(ids)
    assert torch.equal(small.run(ids, (33, 1, 6, 2)), logits)
    exact = Reference(layout, dtype=torch.float64).run_model(torch.tensor(ids))
    rounded = Fp8Reference(layout, rounds=True).run_model(torch.tensor(ids))
    assert 0 < size_of(logits.double() - exact) <= 1.5 * size_of(rounded.double() - exact)


def size_of(x: torch.Tensor) -> float:
    return x.square().mean(1).sqrt().median().item()


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("model", MODELS)
def test_a_family_is_computed_as_the_reference_does(model, dtype):
    layout = layout_of(model, dtype)
    if reason := unfit(layout, 1, 32):
        pytest.skip(reason)
    ids = tokens(90)
    exact = Reference(layout, dtype=torch.float64).run_model(torch.tensor(ids))
    rounded = Reference(layout, rounds=True).run_model(torch.tensor(ids))
    runner = Runner(layout, device=CUDA)
    logits = runner.run(ids)
    error, rounding, size = (size_of(x) for x in (logits.double() - exact, rounded.double() - exact, exact))
    assert error <= (2e-5 * size if dtype == F32 else 1.5 * rounding), (error, rounding, size)
    assert torch.equal(runner.run(ids, (33, 1, 6, 2)), logits)


@pytest.mark.parametrize("model", ["llama", "qwen2_moe"])
def test_graphs_give_the_bits_of_single_launches(model):
    layout = layout_of(model)
    ids = [tokens(count, seed) for seed, count in enumerate((19, 34, 3))]
    alone, together = Runner(layout, device=CUDA), Runner(layout, device=CUDA)
    expected = [alone.run(each) for each in ids]
    blocks = [together.blocks(len(each)) for each in ids]
    together.step(*(Part(0, each[:-1], table) for each, table in zip(ids, blocks, strict=True)))
    last = [Part(len(each) - 1, each[-1:], table) for each, table in zip(ids, blocks, strict=True)]
    before = together.executor.layers_done()
    for _ in range(3):
        for row, logits in zip(together.step(*last), expected, strict=True):
            assert torch.equal(row, logits[-1:])
        assert together.best(*last) == [int(logits[-1].argmax()) for logits in expected]
    torch.cuda.synchronize()
    assert together.executor.layers_done() >= before + 6 * len(layout.layers)


@pytest.fixture
def native():
    library_or_skip()
    sampler = OwnPoolSampler.with_threads(4)
    yield sampler
    sampler.close()


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("vocab", [1000, 128_256, 151_936])
def test_draws_and_log_probabilities_are_the_native_samplers(native, vocab, captures):
    device = DeviceSampler(Buffers(CUDA), capture=cuda_capture if captures else None)
    for number, params in enumerate(FILTERS.values()):
        logits, draws = made(67, vocab, 2.0, number), seeded(params, 67)
        draws[:9] = seeded(changed(params, num_logprobs=20), 9)
        assert sampled(device, logits.to(CUDA), draws) == sampled(native, logits, draws)
        changes = {
            "top_k": params.sampling.top_k,
            "top_p": params.sampling.top_p,
            "min_p": params.sampling.min_p,
            "num_logprobs": 3,
        }
        logits, draws, masks = edited_batch(vocab, 100 * number, **changes)
        assert sampled(device, logits.to(CUDA), draws, masks) == sampled(native, logits, draws, masks)


def test_a_step_draws_in_its_graph_what_is_drawn_from_its_logits(native):
    runner = Runner(layout_of("llama"), device=CUDA)
    last = [Part(0, [token], runner.blocks(1)) for token in (5, 6, 7)]
    logits = torch.cat(runner.step(*last))
    for seed in range(5):
        draws = [
            draw_params(seed=seed + row, first_output_index=row, temperature=0.7 * row, top_k=0, top_p=0.9)
            for row in range(3)
        ]
        batch = batch_of(last, runner.block_size)
        batch.draws = lambda given=draws: given
        assert runner.executor.run(batch, with_logits=True).sampled == native.sample(HeadOutput(logits, None), draws)
