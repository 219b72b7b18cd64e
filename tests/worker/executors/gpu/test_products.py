"""Products, experts and row functions for Hugging Face's modules: torch's results, and a row's bits in any company."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.executors.gpu.launches import Launches
from holdfast.worker.executors.gpu.products import DeviceExperts, DeviceProduct, RowFunctions
from holdfast.worker.models.linear import RowParallelLinear, settle
from tests.fake_group import run_ranks
from tests.worker.executors.gpu.cancelling import cancelling_product

CPU, BF16, F32 = torch.device("cpu"), torch.bfloat16, torch.float32


def made(*shape, dtype=F32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_product_is_torchs_and_rounded_once(dtype):
    weight, bias, x = made(70, 33, dtype=dtype), made(70, dtype=dtype), made(2, 5, 33, dtype=dtype)
    y = DeviceProduct(Launches(launch), weight, bias)(x)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * exact.abs() + 1e-5).all()


def test_a_row_of_a_product_has_the_same_bits_in_any_company():
    rows, weight = cancelling_product(70, 96, 40, BF16, CPU)
    product = DeviceProduct(Launches(launch), weight, None)
    together = product(rows)
    assert together.any(), "rounding errors, of which another order would give others"
    for part in (slice(0, 1), slice(3, 20), slice(7, 40)):
        assert torch.equal(product(rows[part]), together[part])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_sum_over_any_number_of_ranks_has_the_same_bits(dtype):
    weight, bias, rows = made(20, 96, dtype=dtype), made(20, dtype=dtype), made(3, 96, dtype=dtype)

    def on_rank(group):
        local = weight.chunk(group.size, 1)[group.rank]
        linear = RowParallelLinear(local, bias, group, num_slices=4 // group.size, split_input=True)
        settle(linear, partial(DeviceProduct, Launches(launch)))
        return linear(rows)

    outputs = [output for size in (1, 2, 4) for output in run_ranks(size, on_rank)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def experts_of(dtype, transposed=False):
    up, down = made(5, 2 * 24, 16, dtype=dtype), made(5, 16, 24, dtype=dtype)
    up_bias, down_bias = made(5, 48, dtype=dtype), made(5, 16, dtype=dtype)

    def activate(rows):
        gate, value = rows.chunk(2, -1)
        return F.silu(gate) * value

    return up, up_bias, down, down_bias, activate


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_experts_are_those_that_each_row_has_chosen(dtype):
    up, up_bias, down, down_bias, activate = experts_of(dtype)
    experts = DeviceExperts(launch, up, up_bias, down, down_bias, activate)
    x, weights = made(20, 16, dtype=dtype), made(20, 2).softmax(-1).to(dtype)
    chosen = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(row))[:2] for row in range(20)])
    found = experts(x, chosen, weights)
    exact = torch.zeros(20, 16, dtype=torch.float64)
    for row in range(20):
        for expert, weight in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            inner = activate(F.linear(x[row].double(), up[expert].double(), up_bias[expert].double()))
            exact[row] += weight * F.linear(inner, down[expert].double(), down_bias[expert].double())
    tolerance = {F32: 1e-4, BF16: 0.05}[dtype] * exact.abs().max()
    assert (found.double() - exact).abs().max() < tolerance
    for part in (slice(4, 5), slice(3, 12)):
        assert torch.equal(experts(x[part], chosen[part], weights[part]), found[part])
    assert torch.equal(experts(x, chosen.flip(-1), weights.flip(-1)), found), "in the order of their ids"


def reductions(x):
    return (
        x.mean(-1, keepdim=True),
        x.mean(dim=-1),
        torch.sum(x, dim=(-1,)),
        x.sum(x.dim() - 1, keepdim=True),
        F.linear(x, torch.ones(3, x.shape[-1], dtype=x.dtype)),
    )


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_are_reduced_as_torch_does_by_our_kernels(dtype):
    x, launched = made(3, 4, 100, dtype=dtype), []

    def noted(kernel, *arguments, **options):
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **options)

    with RowFunctions(noted, CPU):
        ours = reductions(x)
    assert launched == ["sum_rows"] * 4 + ["linear"]
    for found, expected in zip(ours, reductions(x.double()), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=2e-2 if dtype == BF16 else 1e-5, atol=1e-2)


def test_what_is_no_sum_of_rows_stays_torchs():
    launched = []
    counts = torch.ones(3, 4, dtype=torch.int64)
    with RowFunctions(lambda *arguments, **options: launched.append(arguments), CPU):
        assert counts.sum(-1).tolist() == [4, 4, 4]
        assert torch.ones(3, 4).sum(0).tolist() == [3.0] * 4
        assert float(torch.ones(3, 4).sum()) == 12.0
        assert torch.ones(3, 4).sum(-1, dtype=torch.float64).dtype == torch.float64
        assert torch.ones(3, 0).sum(-1).tolist() == [0.0] * 3
    assert not launched


def test_a_row_is_reduced_by_itself():
    rows, _ = cancelling_product(1, 4096, 12, F32, CPU)
    rows = torch.cat((rows, -rows.flip(-1)), 1)
    means = partial(torch.mean, dim=-1)
    with RowFunctions(launch, CPU):
        together = means(rows)
        assert all(torch.equal(means(rows[row : row + 1]), together[row : row + 1]) for row in range(12))
