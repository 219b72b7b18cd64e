"""Linears of quantized weights have the bits of linears of what these are dequantized to."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.coded import CodedMatrix
from holdfast.worker.executors.gpu import linear_tiles
from holdfast.worker.executors.gpu.launches import Launches
from holdfast.worker.executors.gpu.linear_tiles import coded_on, in_words, inputs_together
from holdfast.worker.executors.linears import Linear
from holdfast.worker.models.formats.gguf_block_names import BLOCKS
from holdfast.worker.models.formats.gguf_tensors import GgufWeight
from holdfast.worker.models.formats.quantized_weight import QuantizedWeight
from tests.worker.executors.gpu.cancelling import cancelling_product
from tests.worker.executors.gpu.coded import FORMS, weight_of
from tests.worker.models.formats.gguf_files import random_blocks

CPU, BF16, F16, F32 = torch.device("cpu"), torch.bfloat16, torch.float16, torch.float32


def product(weight: Linear, x: Tensor, num_slices: int = 1) -> Tensor:
    out = torch.full((num_slices, len(x), weight.out_features), torch.nan)
    Launches(launch).linear(x, weight, out)
    return out


def both(
    weights: list[QuantizedWeight], dtype: torch.dtype, num_rows: int, num_slices: int = 1
) -> tuple[Tensor, Tensor, CodedMatrix]:
    """The products of random rows with the codes and with the numbers."""
    numbers = torch.cat([weight.to(dtype) for weight in weights])
    x = torch.randn(num_rows, numbers.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    coded = coded_on(CPU, weights, num_slices)
    found = product(Linear(codes=(coded,)), x, num_slices)
    return found, product(Linear(weights=(numbers,)), x, num_slices), coded


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "num_rows"), [(BF16, 1), (F16, 20), (F32, 2)])
def test_products_have_the_bits_of_the_numbers(form, dtype, num_rows):
    found, expected, _ = both([weight_of(outputs=70, **FORMS[form])], dtype, num_rows)
    assert found.equal(expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_products_of_gguf_types_have_the_bits_of_the_numbers(kind):
    """Minima, scales of float16 and float32, groups of 16."""
    values, num_bytes = BLOCKS[kind]
    blocks = random_blocks(kind, (40, 512), 0) if "K" in kind else simple_blocks(kind, 40 * 512 // values)
    weight = GgufWeight(
        kind=kind,
        stored=torch.from_numpy(blocks.reshape(40, -1)),
        order=torch.arange(40).flip(0),
        rows=(0, 40),
        columns=(0, 512),
        plus=0.0,
        is_vector=False,
    )
    assert len(weight.stored[0]) == 512 // values * num_bytes
    numbers = weight.numbers(0, 40).bfloat16()
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    coded = coded_on(CPU, [weight], 2)
    assert product(Linear(codes=(coded,)), x, 2).equal(product(Linear(weights=(numbers,)), x, 2))


def simple_blocks(kind: str, count: int) -> NDArray[np.uint8]:
    """Random codes behind scales, and minima, that make small numbers."""
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (count, BLOCKS[kind][1]), dtype=np.uint8)
    head = 2 if kind in ("Q4_0", "Q8_0") else 4
    blocks[:, :head] = (0.01 * generator.random((count, head // 2))).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("form", ["int4 g32", "int4 in order of activations", "int8 g32, zero points", "e4m3 g128"])
def test_sums_in_slices_and_of_stacked_parts_have_the_bits_of_the_numbers(form):
    """Slices of e4m3 cut a group of 128, so that smaller ones are made of it."""
    changes = {"inputs": 448} if form == "e4m3 g128" else {}
    parts = [weight_of(outputs=outputs, **{**FORMS[form], **changes}) for outputs in (40, 30)]
    found, expected, coded = both(parts, BF16, 3, num_slices=2)
    assert found.equal(expected)
    assert coded.shape == (70, changes.get("inputs", FORMS[form]["inputs"]))
    if form == "e4m3 g128":
        assert coded.group_inputs == 32


def test_a_row_has_the_same_bits_in_any_company():
    weight = weight_of(outputs=70, **FORMS["int4 g128, zero points"])
    coded = coded_on(CPU, [weight], 1)
    rows, _ = cancelling_product(70, 256, 40, BF16, CPU)
    together = product(Linear(codes=(coded,)), rows)
    for part in (slice(0, 1), slice(3, 20), slice(7, 40)):
        assert product(Linear(codes=(coded,)), rows[part]).equal(together[:, part])


def test_inputs_that_a_tile_takes_together():
    groups = torch.arange(1024)
    assert inputs_together(groups // 32, 256) == 32
    assert inputs_together(groups // 512, 512) == 512
    assert inputs_together(groups // 512, 128) == 128, "no slice begins within them"
    assert inputs_together((groups + 64) // 128, 1024) == 64, "a share is cut within a group"
    assert inputs_together(groups // 24, 1024) == 0, "each input names its own"
    assert inputs_together(groups * 0, 1000) == 1024, "one group"


def test_a_code_that_is_no_number_is_refused():
    weight = weight_of("e4m3", 4, 32, 32)
    weight.codes.stored.view(torch.uint8)[2, 5] = 0xFF
    with pytest.raises(ConfigurationError, match="fp8 has codes that stand for NaN"):
        coded_on(CPU, [weight], 1)


class TestPlanted:
    """Mistakes of what is packed, and of a kernel that would read it so, change bits."""

    @staticmethod
    def differs(form: str, num_slices: int = 1) -> bool:
        found, expected, _ = both([weight_of(outputs=40, **FORMS[form])], BF16, 2, num_slices)
        return not found.equal(expected)

    def test_halves_of_bytes_swapped(self, monkeypatch):
        def swapped(codes: Tensor) -> Tensor:
            words = in_words(codes)
            return ((words & 0x0F0F0F0F) << 4) | ((words >> 4) & 0x0F0F0F0F)

        assert not self.differs("int4 g32")
        monkeypatch.setattr(linear_tiles, "in_words", swapped)
        assert self.differs("int4 g32")

    @pytest.mark.parametrize("form", ["int4 g128, zero points", "int8 g32, zero points"])
    def test_a_zero_point_off_by_one(self, monkeypatch, form):
        self.change(monkeypatch, lambda rows: replace(rows, offsets=rows.offsets ^ 1))
        assert self.differs(form)

    @pytest.mark.parametrize("form", ["int4 g32", "int8 g32, zero points", "int4 in order of activations", "e4m3 g128"])
    def test_the_scale_of_the_group_beside(self, monkeypatch, form):
        self.change(monkeypatch, lambda rows: replace(rows, scales=rows.scales.roll(1, 1)))
        assert self.differs(form)

    def test_an_order_of_activations_ignored(self, monkeypatch):
        plain = property(lambda self: torch.arange(256) // 32)
        monkeypatch.setattr(QuantizedWeight, "input_groups", plain)
        assert self.differs("int4 in order of activations")

    @staticmethod
    def change(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
        plain = QuantizedWeight.coded
        monkeypatch.setattr(QuantizedWeight, "coded", lambda self, *rows: change(plain(self, *rows)))
