"""Weights of E4M3 that stay codes in memory: products have the bits of the dequantized weight's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.worker.executors.cpu.build import IN_SOFTWARE
from holdfast.worker.executors.cpu.code_packing import PackedCodes, pack_codes
from holdfast.worker.executors.cpu.packed_rows import NO_ROW
from holdfast.worker.executors.finite import NotFiniteError
from holdfast.worker.models.formats.codes import PlainCodes
from holdfast.worker.models.formats.quantized_weight import QuantizedWeight
from tests.examples import examples
from tests.worker.executors.cpu.native import ALL, BF16, Product, library_or_skip, same_bits

NAN = 0x7F


def weight_of(
    outputs: int, inputs: int, block: tuple[int, int], scales: torch.Tensor, seed: int = 0, zero: float | None = None
) -> QuantizedWeight:
    """Random codes, all that are numbers among them; scales are repeated over the blocks."""
    bits = torch.randint(256, (outputs, inputs), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    bits[(bits & NAN) == NAN] = 0x80
    shape = -(-outputs // block[0]), -(-inputs // block[1])
    grid = scales.repeat(-(-shape[0] * shape[1] // len(scales)))[: shape[0] * shape[1]].view(shape)
    return QuantizedWeight(
        rows=(0, outputs),
        columns=(0, inputs),
        codes=PlainCodes(bits.view(torch.float8_e4m3fn)),
        scales=grid,
        zeros=None if zero is None else torch.full(shape, zero),
        block_rows=block[0],
        groups=torch.arange(inputs) // block[1],
    )


SHAPES = st.tuples(
    st.sampled_from([1, 2, 3, 4, 9, 33]),  # rows
    st.integers(1, 9),  # tiles of a slice
    st.integers(1, 150),  # outputs
    st.sampled_from([1, 2, 4]),  # slices
    st.sampled_from([(1, 1 << 20), (1, 32), (16, 64), (1 << 20, 1 << 20), (128, 128)]),  # of scales
)
SCALES = torch.tensor([0.013, -1.7, 31.0, 0.0, 2.0**-20, 1e-4, 3.3])


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(24), deadline=None, derandomize=True)
@given(shape=SHAPES, dtype=st.sampled_from([torch.float32, BF16]), seed=st.integers(0, 99))
def test_products_have_the_bits_of_the_dequantized_weight(name, shape, dtype, seed):
    rows, tiles, outputs, slices, block = shape
    if name in IN_SOFTWARE:  # whose products take a hundred times as long
        tiles, slices = min(tiles, 3), min(slices, 2)
    library, inputs = library_or_skip(name), tiles * slices * 32
    weight = weight_of(outputs, inputs, block, SCALES.to(dtype), seed)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(BF16)
    coded = Product(library, weight, slices, compacts=True)
    assert coded.native.code_run > 0
    assert same_bits(coded(x), Product(library, weight.to(BF16), slices)(x))


@pytest.mark.parametrize("scale", [2.0**-118, 2.0**119, torch.inf, torch.nan])
def test_a_scale_that_is_no_use_for_codes_makes_numbers_of_them(scale):
    weight = weight_of(40, 64, (1, 32), torch.tensor([1.0, scale]))
    assert packed(weight) is None


@pytest.mark.parametrize(("block", "zero"), [((1, 48), None), ((1, 32), 3.0)])
def test_other_forms_are_left_to_others(block, zero):
    assert packed(weight_of(40, 96, block, SCALES, zero=zero)) is None
    assert packed(weight_of(40, 96, (1, 32), SCALES)) is not None


def test_a_code_that_is_a_nan_is_refused():
    weight = weight_of(40, 64, (1, 64), SCALES)
    weight.codes.stored.view(torch.uint8)[39, 63] = 0x80 | NAN
    with pytest.raises(NotFiniteError):
        packed(weight)


def test_codes_take_their_own_size_and_little_more():
    coded = packed(weight_of(256, 2048, (1, 2048), SCALES))
    assert coded is not None
    assert coded.panel_bytes * 256 // 32 < 1.01 * 256 * 2048


def packed(weight: QuantizedWeight) -> PackedCodes | None:
    """Its panels, if it is packed as codes."""
    product = Product(library_or_skip("avx2"), torch.zeros(64, 32, dtype=BF16))
    rows = np.arange(-(-len(weight) // 64) * 64)
    rows[len(weight) :] = NO_ROW
    return pack_codes((weight,), rows, 1, product._arena, product._library, product._pool)
