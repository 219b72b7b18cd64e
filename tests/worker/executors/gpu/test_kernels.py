"""Linears, norms, heads, activations and the argmax against float64; a row's bits are the same in any company."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.executors import kv_cache as fp8
from holdfast.worker.executors.gpu.launches import COLUMNS, Launches, StepTensors, num_vocab_blocks
from holdfast.worker.executors.gpu.layers import kv_spec
from holdfast.worker.executors.gpu.weights import angle_table
from holdfast.worker.executors.kv_cache import KVCache
from holdfast.worker.executors.layout import Activation, Attention, Rotary
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.models.reference_functions import activated, rotated

LAUNCHES = Launches(launch)
BF16, F32 = torch.bfloat16, torch.float32
SLOW = partial(pytest.param, marks=pytest.mark.slow)
NOTHING = Linear(weights=(torch.empty(0, 0),))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(
    x: Tensor, weight: Tensor, slices: int = 1, bias: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    out = torch.full((slices, len(x), len(weight)), torch.nan)
    LAUNCHES.linear(x, Linear(weights=(weight,), bias=bias), out, scale=0.5, softcap=softcap)
    return out


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_linear_is_exact_and_its_rows_do_not_depend_on_their_number(dtype):
    """At 1, 17, 40 and 70 rows each of the tiles is used."""
    x, weight, bias = random(70, 136, dtype=dtype), random(72, 136, seed=1, dtype=dtype), random(72, seed=2)
    whole = product(x, weight, bias=bias)[0]
    torch.testing.assert_close(whole.double(), (x.double() @ weight.double().T + bias) * 0.5, rtol=0, atol=2e-5)
    for first, count in ((69, 1), (3, 17), (30, 40)):
        assert torch.equal(product(x[first : first + count], weight, bias=bias)[0], whole[first : first + count])


def test_slices_of_a_sum_are_those_of_ranks():
    """A rank that has half of the inputs gives the same partial sums."""
    x, weight = random(3, 128, dtype=BF16), random(64, 128, seed=1, dtype=BF16)
    parts = product(x, weight, slices=4)
    halves = [
        product(x[:, half].contiguous(), weight[:, half].contiguous(), slices=2) for half in (slice(64), slice(64, 128))
    ]
    assert torch.equal(parts, torch.cat(halves))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 150),
    st.integers(1, 300),
    st.sampled_from((BF16, torch.float16, torch.float32)),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((None, 3.0)),
)
def test_a_linear_of_any_shape(num_rows, num_outputs, slice_inputs, dtype, slices, softcap):
    x, weight = (
        random(num_rows, slice_inputs * slices, dtype=dtype),
        random(num_outputs, slice_inputs * slices, dtype=dtype),
    )
    found = product(x, weight, slices, softcap=softcap)
    for index, part in enumerate(found):
        some = slice(index * slice_inputs, (index + 1) * slice_inputs)
        exact = x[:, some].double() @ weight[:, some].double().T * 0.5
        exact = exact if softcap is None else torch.tanh(exact / softcap) * softcap
        torch.testing.assert_close(part.double(), exact, rtol=1e-5, atol=1e-4)
    row = num_rows // 2
    assert torch.equal(product(x[row : row + 1], weight, slices, softcap=softcap)[:, 0], found[:, row])


def exact_norm(norm: Norm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    x = x - x.mean(-1, keepdim=True) if norm.kind == "layer" else x
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    return y if norm.bias is None else y + norm.bias.double()


NORMS = (
    None,
    Norm(kind="rms", weight=random(72, seed=7), eps=1e-5),
    Norm(kind="layer", weight=random(72, seed=8), bias=random(72, seed=9), eps=1e-5),
)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("out_norm", NORMS[:2])
@pytest.mark.parametrize("num_parts", [1, 8])
def test_additions_and_norms(norm, out_norm, num_parts):
    x, parts, bias = random(5, 72), random(num_parts, 5, 72, seed=1), random(72, seed=2)
    residual, out, progress = x.clone(), torch.empty(5, 72, dtype=BF16), torch.zeros(1, dtype=torch.int64)
    LAUNCHES.add_norm(residual, parts, norm, out, bias=bias, out_norm=out_norm, scale=0.5, progress=progress)
    exact = x.double() + 0.5 * exact_norm(out_norm, parts.double().sum(0) + bias.double())
    torch.testing.assert_close(residual.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.double(), exact_norm(norm, residual.double()), rtol=2**-8, atol=1e-3)
    assert progress.tolist() == [1]
    wanted, few, kept = torch.tensor([4, 0, 4], dtype=torch.int32), torch.empty(3, 72, dtype=BF16), x.clone()
    LAUNCHES.add_norm(kept, parts, norm, few, bias=bias, out_norm=out_norm, scale=0.5, wanted=wanted)
    assert torch.equal(few, out[[4, 0, 4]])
    assert torch.equal(kept, x)


@pytest.mark.parametrize("num_parts", [1, 2, 4, 8])
def test_parts_are_added_as_a_tree(num_parts):
    parts, out = random(num_parts, 3, 700), torch.empty(3, 700)
    LAUNCHES.sum_parts(parts, out)
    level = list(parts)
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    assert torch.equal(out, level[0])


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("has_gate", [True, False])
def test_activations(activation, has_gate):
    up, out = random(3, 80 * (1 + has_gate)) * 4, torch.empty(3, 80)
    LAUNCHES.activate(up, activation, has_gate, out)
    gate, other = up.double().split(80, 1) if has_gate else (up.double(), 1.0)
    if activation is Activation.CLAMPED_SWIGLU:
        gate = gate.clamp(max=7.0)
        other = other if not has_gate else other.clamp(-7.0, 7.0) + 1.0
        exact = gate * torch.sigmoid(1.702 * gate) * other
    else:
        exact = activated(activation, gate) * other
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


HEADS = Attention(
    num_heads=3,
    num_kv_heads=1,
    head_dim=20,
    qkv=NOTHING,
    query_norm=Norm(kind="rms", weight=random(20, seed=3), eps=1e-6),
    key_norm=Norm(kind="layer", weight=random(20, seed=4), bias=random(20, seed=5), eps=1e-6),
    rotary=0,
    scaling=1.0,
    output=NOTHING,
)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pairs", [SLOW(0), 6, SLOW(10)])
@pytest.mark.parametrize("normed", ["heads", SLOW("own"), SLOW("none")])
def test_heads_are_normed_turned_and_written(interleaved, pairs, normed):
    """The third row is padding: nothing is written of it."""
    own = random(3, 20, seed=6), random(1, 20, seed=7)
    query_norm, key_norm = HEADS.query_norm, HEADS.key_norm
    if normed == "own":
        query_norm, key_norm = (Norm(kind="rms", weight=weight, eps=1e-6) for weight in own)
    elif normed == "none":
        query_norm = key_norm = None
    attention = replace(HEADS, query_norm=query_norm, key_norm=key_norm)
    rotary = Rotary(inverse_frequencies=random(pairs).abs(), scaling=1.5, interleaved=interleaved)
    qkv, positions = random(3, 100), torch.tensor([5, 900, 7], dtype=torch.int32)
    slots = torch.tensor([6, 1, -1], dtype=torch.int32)
    queries, in_fp8 = (
        torch.zeros(3, 60),
        KVCache.allocate([kv_spec(attention)], 4, 2, F32, "cpu", in_fp8=True).layers[0],
    )
    pages = KVCache.allocate([kv_spec(attention)], 4, 2, F32, "cpu").layers[0]
    step = StepTensors(token_ids=slots, positions=positions, slots=slots, tables=slots, tiles=())
    angles = angle_table(rotary, 1000) if pairs else None
    LAUNCHES.split_heads(attention, qkv, step, angles, interleaved, queries, in_fp8)
    LAUNCHES.split_heads(attention, qkv, step, angles, interleaved, queries, pages)
    exact = qkv.double().view(3, 5, 20)
    q, k = exact_norm(query_norm, exact[:, :3]), exact_norm(key_norm, exact[:, 3:4])
    if pairs:
        q, k = (rotated(part, rotary, positions.long()) for part in (q, k))
    torch.testing.assert_close(queries.double().view(3, 3, 20), q, rtol=0, atol=1e-5)
    codes, scales = (in_fp8.keys, in_fp8.values), (in_fp8.key_scales, in_fp8.value_scales)
    for cache, expected, *stored in zip((pages.keys, pages.values), (k, exact[:, 4:]), codes, scales, strict=True):
        encoded, own_scales = fp8.encoded(cache)
        assert torch.equal(stored[0], encoded)
        assert torch.equal(stored[1].transpose(1, 2), own_scales)
        flat = cache.flatten(0, 1).double()
        torch.testing.assert_close(flat[[6, 1]], expected[:2], rtol=0, atol=1e-5)
        assert not flat[[0, 2, 3, 4, 5, 7]].any()


@pytest.mark.parametrize("dtype", [BF16, SLOW(torch.float16), SLOW(F32)])
def test_rows_in_fp8_lie_where_those_of_the_models_dtype_do(dtype):
    """3 KV heads, blocks of 4: each scale at its head and slot. A padding row writes none."""
    attention = replace(HEADS, num_heads=3, num_kv_heads=3, query_norm=None, key_norm=None, rotary=None)
    qkv = random(5, 180) * torch.tensor([[1e-3], [1.0], [40.0], [7e4], [1.0]])
    slots = torch.tensor([14, 3, 8, 9, -1], dtype=torch.int32)
    step = StepTensors(token_ids=slots, positions=slots, slots=slots, tables=slots, tiles=())
    queries, specs = torch.zeros(5, 60, dtype=dtype), [kv_spec(attention)]
    plain, in_fp8 = (KVCache.allocate(specs, 4, 4, dtype, "cpu", in_fp8=flag).layers[0] for flag in (False, True))
    for pages in (plain, in_fp8):
        LAUNCHES.split_heads(attention, qkv, step, None, False, queries, pages)
    for numbers, codes, scales in (
        (plain.keys, in_fp8.keys, in_fp8.key_scales),
        (plain.values, in_fp8.values, in_fp8.value_scales),
    ):
        assert int(numbers.flatten(0, 1).any(-1).sum()) == 4 * 3
        expected, expected_scales = fp8.encoded(numbers)
        assert torch.equal(codes, expected)
        assert torch.equal(scales.transpose(1, 2), expected_scales)


def best_of(logits: Tensor, num_columns: int, num_ranks: int = 1) -> tuple[list[int], Tensor]:
    """Of the ranks' logits side by side."""
    width = logits.shape[1] // num_ranks
    bests, places = [], []
    for rank in range(num_ranks):
        blocks = num_vocab_blocks(width)
        bests.append(torch.empty(len(logits), blocks, 3))
        places.append(torch.empty(len(logits), blocks, dtype=torch.int32))
        own = max(0, min(width, num_columns - rank * width))
        LAUNCHES.best_of_blocks(logits[:, rank * width : (rank + 1) * width], own, bests[-1], places[-1])
    tokens, sums = torch.empty(len(logits), dtype=torch.int32), torch.empty(len(logits))
    LAUNCHES.best_of_rows(torch.stack(bests), torch.stack(places), width, tokens, sums)
    return tokens.tolist(), sums


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_best_token_of_a_row_and_its_logsumexp(num_ranks):
    """Of equal logits the lowest; -1 where one is not finite; columns of padding count for nothing."""
    size = 2 * COLUMNS.value + 100
    logits = random(4, size) * 3
    logits[0, [40, COLUMNS.value + 5]] = 99.0
    logits[1, 17], logits[2, size - 1], logits[3, size - 40 :] = torch.nan, torch.inf, 1000.0
    tokens, sums = best_of(logits, size - 40, num_ranks)
    assert tokens == [40, -1, int(logits[2, : size - 40].argmax()), int(logits[3, : size - 40].argmax())]
    exact = logits[:, : size - 40].double().logsumexp(1)
    torch.testing.assert_close(sums.double()[[0, 2, 3]], exact[[0, 2, 3]], rtol=0, atol=1e-4)
