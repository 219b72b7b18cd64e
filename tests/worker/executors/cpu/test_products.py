"""Products with packed weights: near the exact ones, in the documented order, whoever is beside a row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.cpu.products import PackedProduct
from tests.examples import examples
from tests.worker.executors.cpu.native import ALL, BF16, F16, F32, Product, library_or_skip, other_classes, same_bits

DTYPES = (BF16, F16, F32)
ROUNDING = 2.0**-24


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, std: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).normal_(0.0, std, generator=generator).to(dtype)


def linear(dtype: torch.dtype, rows: int, inner: int, outputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs [rows, inner], of the dtype that they are kept in, and a weight."""
    return random((rows, inner), BF16 if dtype == BF16 else F32, seed), random((outputs, inner), dtype, seed + 1)


SHAPES = st.tuples(
    st.one_of(st.integers(1, 70), st.sampled_from([256, 257, 300])),  # rows
    st.integers(1, 130),  # inputs of a slice
    st.integers(1, 150),  # outputs
    st.sampled_from([1, 2, 4, 8]),  # slices
)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(32), deadline=None, derandomize=True)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_a_product_is_near_the_exact_one(dtype, shape, seed):
    rows, length, outputs, slices = shape
    x, weight = linear(dtype, rows, length * slices, outputs, seed)
    y = Product(library_or_skip(), weight, slices)(x)
    exact = x.double() @ weight.double().T
    # Half of a tile's products one after the other, two sums, tiles, slices: so many roundings of what is summed.
    roundings = 16 + 1 + -(-length // 32) + 3
    bound = roundings * ROUNDING * 1.01 * (x.double().abs() @ weight.double().abs().T)
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("other", [name for name in ALL if name != "avx2"])
@settings(max_examples=examples(16), deadline=None, derandomize=True)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_all_classes_give_the_same_bits(other, shape, seed):
    rows, length, outputs, slices = shape
    for dtype in DTYPES:
        if other not in ("avx2", *other_classes(dtype)):
            continue  # software tiles are for bf16 alone
        x, weight = linear(dtype, rows, length * slices, outputs, seed)
        one, two = (Product(library_or_skip(name), weight, slices)(x) for name in ("avx2", other))
        assert same_bits(one, two)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_a_row_is_the_same_whoever_is_beside_it(name, dtype):
    """Rows of zeros, of huge numbers and of NaN are beside it, in any place of any batch."""
    if name not in ("avx2", *other_classes(dtype)):
        pytest.skip("classes in software are for bf16 alone; the plain dtypes run in the others")
    x, weight = linear(dtype, 300, 96, 80)
    product = Product(library_or_skip(name), weight, slices=1)
    alone = torch.cat([product(row[None]) for row in x[:40]])
    for count in (2, 3, 4, 5, 15, 16, 17, 18, 31, 32, 33, 47, 48, 49, 64, 65, 255, 256, 257, 300):
        batch = product(x[:count])
        assert same_bits(batch[:40], alone[:count]), count
    x[1::3] = torch.nan
    x[2::3] = 3e38
    assert same_bits(product(x)[:40:3], alone[::3])


@pytest.mark.parametrize(("slices", "dtype"), [(1, BF16), (2, BF16), (1, F16), (1, F32)])
@pytest.mark.parametrize("name", ALL)
def test_a_long_sum_is_the_same_for_one_row_and_for_many(name, slices, dtype):
    """Many rows take it in pieces, between which their sums are stored."""
    if name != "avx2" and name not in other_classes(dtype):
        pytest.skip("classes in software are for bf16 alone; the plain dtypes run in the others")
    x, weight = linear(dtype, 70, 1100 * slices, 130)
    product = Product(library_or_skip(name), weight, slices)
    alone = torch.cat([product(row[None]) for row in x])
    for count in (2, 3, 4, 5, 8, 11, 13, 17, 33, 48, 49, 64, 70):
        assert same_bits(product(x[:count]), alone[:count]), count


# --- the documented order, in numpy ---


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """round(a * b + c) in float32, for numbers whose exact result float64 holds: then it is rounded once."""
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return exact.astype(np.float32)


def in_order(x: np.ndarray, weight: np.ndarray, slices: int) -> np.ndarray:
    """x [rows, k] times weight [outputs, k] as docs/decoder.md says."""
    parts = [
        tiles_in_order(a, b) for a, b in zip(np.split(x, slices, axis=1), np.split(weight, slices, axis=1), strict=True)
    ]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def tiles_in_order(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    total = np.zeros((len(x), len(weight)), dtype=np.float32)
    for first in range(0, x.shape[1], 32):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for k in range(first, min(first + 32, x.shape[1]), 2):
            even = fma(x[:, None, k], weight[None, :, k], even)
            if k + 1 < x.shape[1]:
                odd = fma(x[:, None, k + 1], weight[None, :, k + 1], odd)
        total = total + (even + odd)
    return total


def sums_within_float64(x: np.ndarray, weight: np.ndarray) -> bool:
    """Whether every product, and every sum of one with a float32 sum of others, fits into the 53 bits of float64.

    A product of two 8-bit significands ends at 2^(ex + ew - 14) and a sum of them at that of the smallest, or it was
    rounded to the 24 bits of its own exponent; the largest sum is below the sum of absolute values.
    """
    x, weight = np.abs(x[x != 0]), np.abs(weight[weight != 0])
    lowest = np.log2(x.min()) // 1 + np.log2(weight.min()) // 1 - 14
    return float(np.log2(x.max() * weight.max() * 32)) - lowest < 53


@pytest.mark.parametrize("rows", [1, 2, 20, 33])
@pytest.mark.parametrize(("length", "slices"), [(64, 1), (40, 1), (33, 4), (96, 8), (7, 2)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_order_is_the_documented_one(dtype, length, slices, rows):
    x, weight = random((rows, length * slices), BF16, 3), random((70, length * slices), BF16, 4)
    # Numbers of few exponents, so that float64 holds what is summed; rounding to float32 happens all the same.
    x, weight = (torch.where(part.abs() < 2**-6, 0.5, part) for part in (x, weight))
    assert sums_within_float64(x.float().numpy(), weight.float().numpy())
    expected = torch.from_numpy(in_order(x.float().numpy(), weight.float().numpy(), slices))
    assert torch.equal(weight.to(dtype).float(), weight.float())
    for name in (name for name in ALL if name == "avx2" or name in other_classes(dtype)):
        product = Product(library_or_skip(name), weight.to(dtype), slices)
        assert same_bits(product(x), expected), name


def test_another_order_gives_other_bits():
    """The comparison above would notice."""
    x, weight = (part.float().numpy() for part in (random((20, 96), BF16, 3), random((70, 96), BF16, 4)))
    expected = in_order(x, weight, slices=4)
    pairs_exchanged = np.arange(96).reshape(-1, 2)[:, ::-1].reshape(-1)
    assert np.array_equal(
        in_order(x[:, pairs_exchanged], weight[:, pairs_exchanged], 4), expected
    )  # even and odd: a + b
    backwards = np.arange(96)[::-1]
    assert not np.array_equal(in_order(x[:, backwards], weight[:, backwards], 4), expected)
    assert not np.array_equal(in_order(x, weight, 2), expected)
    assert not np.array_equal(x @ weight.T, expected)


def test_denormal_numbers_are_zeros():
    tiny = torch.full((2, 64), 2.0**-130).to(BF16)
    for name in ALL:
        for rows in (1, 2):
            assert (Product(library_or_skip(name), torch.full((64, 64), 2.0**100).to(BF16))(tiny[:rows]) == 0).all()
            small = Product(library_or_skip(name), torch.full((64, 64), 2.0**-70).to(BF16))
            assert (small(torch.full((rows, 64), 2.0**-64).to(BF16)) == 0).all()


# --- the tile configuration ---


@pytest.mark.parametrize("name", ["amx", "tiles512", "tiles2"])
@pytest.mark.parametrize("rows", [*range(2, 34), 40, 47, 49, 63])
def test_every_byte_of_the_tile_configuration_counts(name, rows):
    """Tiles 0, 1 and 4 have the first 16 rows, 2, 3 and 5 the others, 6 and 7 sixteen rows of weights.

    A compiler that is told that fewer than 64 bytes are read drops the stores to the others: then some tiles have other
    rows or none.
    """
    library = library_or_skip(name)
    x, weight = linear(BF16, rows, 64, 64)
    product, alone = Product(library, weight), Product(library_or_skip("avx2"), weight)
    assert same_bits(product(x), alone(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 33, 70), (300, 100, 150), (0, 32, 64)])
def test_the_threads_of_a_pool_give_the_bits_of_one(dtype, shape):
    rows, inner, outputs = shape
    x, weight = linear(dtype, rows, inner, outputs)
    bias = random((outputs,), dtype, 7)
    expected = (Product(library_or_skip(), weight)(x) + bias.float()).to(dtype)
    for num_threads in (1, 3):
        assert same_bits(PackedProduct(NativePool(num_threads), weight, bias)(x), expected)


def test_a_weight_of_another_dtype_is_refused():
    with pytest.raises(ConfigurationError, match=r"a weight is torch.float64: .* bfloat16, float16, float32"):
        PackedProduct(NativePool(1), torch.zeros(2, 2, dtype=torch.float64), None)
