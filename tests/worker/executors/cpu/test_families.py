"""The native executor computes every family as the reference does, within what its roundings allow."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from holdfast.worker.executors.cpu.packed_rows import in_dtype
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.linears import Linear
from holdfast.worker.models.native_backend import _unfit
from holdfast.worker.models.reference import Reference
from tests.worker.executors.cpu.native import BF16, F16, F32
from tests.worker.executors.cpu.runs import Runner, layout_of, tokens
from tests.worker.executors.models import MODELS

FEW = (
    "cohere2",
    "deepseek_v2, groups",
    "deepseek_v3, groups and yarn",
    "ernie4_5_moe",
    "gemma3_text, softcap",
    "gemma4_text",
    "gemma4_text, shared keys",
    "glm4_moe, groups",
    "glm4_moe_lite",
    "gpt_oss",
    "hunyuan_v1_moe",
    "ministral3",
    "mixtral",
    "olmo2",
    "phi, norms of heads",
    "stablelm, parallel",
    "starcoder2",
)
"""Those that have a part which no other of them has."""

SLOW = [pytest.param(model, marks=() if model in FEW else pytest.mark.slow) for model in MODELS]


def size_of(x: Tensor) -> float:
    """Of a row in the middle: where two experts are nearly equal, a rounding may choose the other, and a row is off."""
    return x.square().mean(1).sqrt().median().item()


def errors(layout: DecoderLayout, chunks: tuple[int, ...], count: int = 90) -> tuple[float, float, float]:
    """Of the executor, of the reference that rounds where executors round, and how large logits are."""
    ids = tokens(count)
    exact = Reference(layout, dtype=torch.float64).run_model(torch.tensor(ids))
    rounded = Reference(layout, rounds=True).run_model(torch.tensor(ids))
    runner = Runner(layout, block_size=16)
    logits = runner.run(ids, chunks)
    runner.close()
    return size_of(logits.double() - exact), size_of(rounded.double() - exact), size_of(exact)


@pytest.mark.parametrize("dtype", [BF16, F32, F16])
@pytest.mark.parametrize("model", SLOW)
def test_a_family_is_computed_as_the_reference_does(model, dtype):
    layout = layout_of(model, dtype)
    if reason := _unfit(layout):
        pytest.skip(reason)
    check(layout, dtype)


def check(layout: DecoderLayout, dtype: torch.dtype, chunks: tuple[int, ...] = (33, 1, 20)) -> None:
    error, rounding, size = errors(layout, chunks)
    assert error <= (1e-5 * size if dtype == F32 else 1.5 * rounding), (error, rounding, size)


def test_a_router_in_float32_is_the_sum_of_its_parts():
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 32)
    parts = in_dtype(Linear(weights=(weight,)), BF16).weights
    assert {part.dtype for part in parts} == {BF16}
    assert torch.equal(sum(part.double() for part in parts), weight.double())
    assert len(in_dtype(Linear(weights=(weight.to(BF16).float(),)), BF16).weights) == 1


def test_a_router_in_float32_is_multiplied_as_it_is():
    layout = layout_of("hunyuan_v1_moe", BF16)
    generator = torch.Generator().manual_seed(0)
    routers = [torch.randn(4, 32, generator=generator) for _ in layout.layers]
    mixed = [
        replace(layer, mlp=replace(layer.mlp, router=Linear(weights=(weight,))))
        for layer, weight in zip(layout.layers, routers, strict=True)
    ]
    check(replace(layout, layers=tuple(mixed)), BF16)


@pytest.mark.parametrize("dtype", [BF16, F32, F16])
@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 96, 128, 256])
def test_heads_of_any_size(head_dim, dtype):
    check(layout_of("llama", dtype, (("head_dim", head_dim),)), dtype)
