"""Whole mixtures of experts against float64; a row's bits are the same in any company, in pieces, and on any ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.executors.gpu.graphs import Buffers
from holdfast.worker.executors.gpu.launches import Launches
from holdfast.worker.executors.gpu.mixtures import MAX_SUM_BYTES, DeviceMixtures, MixtureLaunches
from holdfast.worker.executors.gpu.weights import MAX_EXPERTS, mixture_on, unfit_mixture, views_of
from holdfast.worker.executors.layout import Activation, Experts, Mlp
from holdfast.worker.executors.linears import Linear

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    num_experts: int
    top_k: int
    slices: int = 1
    slice_inner: int = 24
    has_bias: bool = False
    has_shared: bool = False
    hidden: int = 32
    skewed: bool = False
    """All rows choose the same experts."""


def experts_of(shape: Shape, dtype: torch.dtype, seed: int = 0) -> Experts:
    """Random weights, but for the router: whole numbers, so that logits are exact and often equal."""
    generator = torch.Generator().manual_seed(seed)

    def linear(outputs: int, inputs: int, *, has_bias: bool = False) -> Linear:
        weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
        return Linear(weights=(weight,), bias=torch.randn(outputs, generator=generator) if has_bias else None)

    def mlp(inner: int, *, has_bias: bool = False) -> Mlp:
        up, down = linear(2 * inner, hidden, has_bias=has_bias), linear(hidden, inner, has_bias=has_bias)
        return Mlp(activation=Activation.SILU, has_gate=True, up=up, down=down, num_slices=shape.slices)

    count, hidden, inner = shape.num_experts, shape.hidden, shape.slices * shape.slice_inner
    router = torch.randint(-1, 2, (count, hidden), generator=generator).to(dtype)
    return Experts(
        router=Linear(weights=(router,), bias=100.0 * torch.arange(count) if shape.skewed else None),
        top_k=shape.top_k,
        scoring="softmax",
        normalized=True,
        experts=tuple(mlp(inner, has_bias=shape.has_bias) for _ in range(count)),
        shared=mlp(2 * inner) if shape.has_shared else None,
        shared_gate=linear(1, hidden) if shape.has_shared else None,
    )


def inputs_of(num_rows: int, dtype: torch.dtype, seed: int = 0, hidden: int = 32) -> Tensor:
    """Quarters: sums of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-4, 5, (num_rows, hidden), generator=generator) / 4).to(dtype)


class StaleBuffers(Buffers):
    """Full of what is not a number, and of experts and rows that are not there."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        before, tensor = self._memory.get(name), super().take(name, shape, dtype)
        if self._memory[name] is not before:
            self._memory[name].fill_(torch.nan if dtype.is_floating_point else 1 << 20)
        return tensor


def run(experts: Experts, x: Tensor, slots: Sequence[int] = (), most_sum_bytes: int = MAX_SUM_BYTES) -> Tensor:
    launches, own = Launches(launch), MixtureLaunches(launch)
    mixtures = DeviceMixtures(StaleBuffers(CPU), launches, own, most_sum_bytes)
    numbers = torch.tensor(slots or [0] * len(x), dtype=torch.int32)
    return mixtures.run(mixture_on(CPU, experts, experts.shared), x, numbers)


def exact(experts: Experts, x: Tensor) -> Tensor:
    """In float64; of experts with equal logits the first."""
    rows = []
    for row in x.double():
        (router,) = experts.router.weights
        logits = router.double() @ row + (0 if experts.router.bias is None else experts.router.bias.double())
        order = sorted(range(len(logits)), key=lambda expert, of=logits: (-of[expert], expert))[: experts.top_k]
        weights = logits[order].softmax(0)
        total = sum(
            weight * exact_mlp(experts.experts[expert], row) for expert, weight in zip(order, weights, strict=True)
        )
        if experts.shared is not None:
            total = (
                total + exact_mlp(experts.shared, row) * (experts.shared_gate.weights[0][0].double() @ row).sigmoid()
            )
        rows.append(total)
    return torch.stack(rows)


def exact_mlp(mlp: Mlp, row: Tensor) -> Tensor:
    gate, up = exact_linear(mlp.up, row).chunk(2)
    inner = torch.nn.functional.silu(gate) * up
    return exact_linear(mlp.down, inner.to(mlp.down.weights[0].dtype).double())


def exact_linear(linear: Linear, row: Tensor) -> Tensor:
    out = linear.weights[0].double() @ row
    return out if linear.bias is None else out + linear.bias.double()


SHAPES = st.builds(
    lambda experts, top, **more: Shape(experts, min(experts, top), **more),
    st.integers(1, 12),
    st.integers(1, 8),
    slices=st.sampled_from((1, 2, 4, 8)),
    slice_inner=st.sampled_from((8, 12, 33)),
    has_bias=st.booleans(),
    has_shared=st.booleans(),
    skewed=st.booleans(),
)


def check(shape: Shape, num_rows: int, dtype: torch.dtype, seed: int) -> None:
    """Against float64; then each of some rows beside others of a step."""
    experts, x = experts_of(shape, dtype, seed), inputs_of(num_rows, dtype, seed)
    whole = run(experts, x)
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(whole.double(), exact(experts, x), rtol=tolerance, atol=tolerance)
    middle = num_rows // 2
    assert torch.equal(run(experts, x[middle : middle + 1])[0], whole[middle])
    rest = [0 if row >= middle else -1 for row in range(num_rows)]
    assert torch.equal(run(experts, x, rest)[middle:], whole[middle:])


def test_a_mixture_is_exact_and_a_row_does_not_depend_on_others():
    check(Shape(5, 3, slices=2, has_bias=True, has_shared=True), 3, torch.bfloat16, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=12, deadline=None)
@given(SHAPES, st.integers(1, 50), st.sampled_from((torch.bfloat16, torch.float32)), st.integers(0, 9))
def test_a_mixture_of_any_shape(shape, num_rows, dtype, seed):
    check(shape, num_rows, dtype, seed)


@pytest.mark.parametrize("num_rows", [17, pytest.param(70, marks=pytest.mark.slow)])
def test_rows_have_the_same_bits_in_tiles_of_any_size(num_rows):
    """Tiles of 32 and 64 rows; one row alone has a tile of 16."""
    experts, x = experts_of(Shape(3, 3), torch.bfloat16), inputs_of(num_rows, torch.bfloat16)
    whole = run(experts, x)
    for some in (slice(num_rows - 1, num_rows), slice(2, 15)):
        assert torch.equal(run(experts, x[some]), whole[some])


def test_columns_in_turns_have_the_bits_of_all_at_once():
    """128 columns, then 72."""
    shape = Shape(3, 2, slices=2, has_bias=True, has_shared=True, hidden=200)
    experts, x = experts_of(shape, torch.bfloat16), inputs_of(2, torch.bfloat16, hidden=200)
    assert torch.equal(run(experts, x, most_sum_bytes=1), run(experts, x))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_have_the_bits_of_one(num_ranks):
    """Each has a part of every expert's inner dimensions; their sums are the upper part of one tree."""
    shape = Shape(4, 2, slices=4, has_bias=True, has_shared=True)
    experts, x = experts_of(shape, torch.bfloat16), inputs_of(3, torch.bfloat16)
    parts = [run(share(experts, rank, num_ranks), x) for rank in range(num_ranks)]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    assert torch.equal(parts[0], run(experts, x))


def share(experts: Experts, rank: int, num_ranks: int) -> Experts:
    def cut(mlp: Mlp) -> Mlp:
        inner = mlp.down.in_features
        own = torch.arange(inner).view(num_ranks, -1)[rank]
        gate_and_up = torch.cat((own, own + inner))
        up_bias = None if mlp.up.bias is None else mlp.up.bias[gate_and_up]
        down_bias = mlp.down.bias if rank == 0 or mlp.down.bias is None else torch.zeros_like(mlp.down.bias)
        return replace(
            mlp,
            up=Linear(weights=(mlp.up.weights[0][gate_and_up],), bias=up_bias),
            down=Linear(weights=(mlp.down.weights[0][:, own].contiguous(),), bias=down_bias),
            num_slices=mlp.num_slices // num_ranks,
        )

    shared = None if experts.shared is None else cut(experts.shared)
    return replace(experts, experts=tuple(map(cut, experts.experts)), shared=shared)


def test_a_layout_on_a_device_has_the_tensors_of_the_copy():
    """Gate and up are in one piece there, and so are the router and the gate of the shared expert."""
    experts = experts_of(Shape(3, 2, has_bias=True, has_shared=True), torch.bfloat16)
    (whole,) = experts.experts[1].up.weights
    apart = replace(experts.experts[1], up=replace(experts.experts[1].up, weights=(whole[:24], whole[24:])))
    experts = replace(experts, experts=(experts.experts[0], apart, experts.experts[2]))
    mixture = mixture_on(CPU, experts, experts.shared)
    views = views_of(mixture, experts)
    for own, copied in zip(experts.experts, views.experts, strict=True):
        assert torch.equal(torch.cat(own.up.weights), copied.up.weights[0])
        assert torch.equal(own.down.weights[0], copied.down.weights[0])
        assert torch.equal(own.down.bias, copied.down.bias)
    assert views.experts[2].up.weights[0].data_ptr() == mixture.up[2].data_ptr()
    assert torch.equal(views.router.weights[0], experts.router.weights[0])
    assert torch.equal(views.shared_gate.weights[0], experts.shared_gate.weights[0])


def test_mixtures_that_the_kernels_do_not_take_are_refused():
    experts = experts_of(Shape(2, 1, has_shared=True), torch.bfloat16)
    assert unfit_mixture(experts) is None
    assert "other slices" in unfit_mixture(replace(experts, shared=replace(experts.shared, num_slices=8)))
    assert "1025 experts" in unfit_mixture(replace(experts, experts=experts.experts[:1] * (MAX_EXPERTS + 1)))
