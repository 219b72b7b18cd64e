"""Linears: the same numbers as torch's, the same bits in any company, and the same result split over ranks."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.cpu.products import PackedProduct
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.linear import (
    ColumnParallelLinear,
    Linear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    settle,
)
from tests.fake_group import run_ranks

SHAPES = [(192, 64), (64, 192), (33, 100), (128, 2048)]
"""[out, in]; the last is one where this family of kernels is known to treat a single row differently."""


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def settled(module):
    settle(module, partial(PackedProduct, NativePool(2)))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_computes_what_torch_computes(shape, dtype, has_bias):
    weight, x = made(*shape, dtype=dtype), made(2, 5, shape[1], dtype=dtype)
    bias = made(shape[0], dtype=dtype) if has_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    y = settled(Linear(weight, bias))(x)
    assert y.dtype == dtype
    assert ((y.double() - expected).abs().max() / expected.abs().max()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(shape, dtype):
    linear = settled(Linear(made(*shape, dtype=dtype), made(shape[0], dtype=dtype)))
    rows = made(300, shape[1], dtype=dtype)
    together = linear(rows)
    for count in (1, 2, 3, 7, 32, 33, 130, 299):
        for start in range(0, 300 - count, 71):
            assert torch.equal(linear(rows[start : start + count]), together[start : start + count])
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear(rows[shuffled]), together[shuffled])


def test_a_weight_is_let_go_once_it_is_packed():
    weight = made(64, 192)
    kept = weakref.ref(weight)
    linear = settled(Linear(weight, None))
    del weight
    assert not list(linear.parameters())
    assert kept() is None


def test_a_linear_keeps_the_weight_that_it_was_given_until_it_is_settled():
    whole, x = made(64, 192), made(5, 96)
    linear = Linear(whole[:, 96:], None)
    assert linear.weight.data_ptr() == whole[:, 96:].data_ptr()
    before = linear(x)
    settled(linear)
    assert (linear.weight.shape, linear.weight.dtype, linear.weight.device) == ((64, 96), whole.dtype, whole.device)
    with pytest.raises(AttributeError, match="used past the linear"):
        _ = linear.weight.T
    torch.testing.assert_close(linear(x), before)


def test_a_strided_input_will_do():
    weight, x = made(64, 192), made(6, 400)
    linear = settled(Linear(weight, None))
    assert torch.equal(linear(x[:, 3:195]), linear(x[:, 3:195].contiguous()))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("gather_output", [False, True])
def test_column_parallel_outputs_make_up_the_whole(size, gather_output):
    weight, bias, x = made(64, 48), made(64), made(1, 7, 48)

    def on_rank(group):
        linear = ColumnParallelLinear(
            weight.chunk(size)[group.rank],
            bias.chunk(size)[group.rank],
            group,
            gather_output=gather_output,
        )
        return linear(x)

    outputs = run_ranks(size, on_rank)
    for output in outputs if gather_output else [torch.cat(outputs, -1)]:
        torch.testing.assert_close(output, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("split_input", [False, True])
def test_row_parallel_sums_once_and_adds_the_bias_once(size, split_input):
    weight, bias, x = made(64, 48), made(64) + 100, made(1, 7, 48)

    def on_rank(group):
        linear = RowParallelLinear(weight.chunk(size, 1)[group.rank], bias, group, split_input=split_input)
        return linear(x if split_input else x.chunk(size, -1)[group.rank])

    outputs = run_ranks(size, on_rank)
    torch.testing.assert_close(outputs[0], F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_a_row_has_the_same_bits_in_any_company_after_the_sum(size, dtype):
    weight, bias, rows = made(64, 256, dtype=dtype), made(64, dtype=dtype), made(50, 256, dtype=dtype)

    def on_rank(group):
        linear = RowParallelLinear(weight.chunk(size, 1)[group.rank], bias, group, split_input=True)
        settled(linear)
        return linear(rows), torch.cat([linear(rows[i : i + 1]) for i in range(len(rows))])

    for together, alone in run_ranks(size, on_rank):
        assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_inputs", [256, 240])
def test_a_sum_over_any_number_of_ranks_has_the_same_bits(num_inputs, dtype):
    weight, bias, rows = made(64, num_inputs, dtype=dtype), made(64, dtype=dtype), made(9, num_inputs, dtype=dtype)

    def on_rank(group):
        local = weight.chunk(group.size, 1)[group.rank]
        linear = RowParallelLinear(local, bias, group, num_slices=8 // group.size, split_input=True)
        return settled(linear)(rows)

    outputs = [output for size in (1, 2, 4, 8) for output in run_ranks(size, on_rank)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert outputs[0].dtype == dtype


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ends_of_a_model_split_over_the_vocabulary(size):
    vocab_size, table = 126, made(128, 32)
    token_ids = torch.tensor([[0, 31, 32, 63, 64, 125]])
    hidden = made(1, 6, 32)

    def on_rank(group):
        rows = table.chunk(size)[group.rank]
        embedding = VocabParallelEmbedding(rows, group.rank * len(rows), group)
        head = VocabParallelHead(rows, None, group, vocab_size=vocab_size)
        return embedding(token_ids), head(hidden)

    for embedded, logits in run_ranks(size, on_rank):
        assert torch.equal(embedded, table[token_ids])
        torch.testing.assert_close(logits, hidden @ table[:vocab_size].T, rtol=1e-5, atol=1e-5)


def test_a_single_rank_refuses_a_token_outside_the_table():
    with pytest.raises(IndexError):
        VocabParallelEmbedding(made(8, 4), 0, SingleRank())(torch.tensor([8]))
