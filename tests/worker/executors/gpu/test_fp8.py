"""Rows in 8 bits: the format against its definition, and the kernels' functions against the format, to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.executors import kv_cache as fp8
from tests.worker.executors.gpu import fp8_kernels

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
VALUES = torch.arange(256).to(torch.uint8).view(E4M3).double()
"""Of all codes; two are NaN."""

EDGES = torch.tensor([0.0, 2.0**-10, 2.0**-9, 1.5 * 2.0**-9, 2.0**-6, 1.0, 1.0625, 1.1875, 432.0, 448.0, 464.0, 465.0])
EDGES = torch.cat((EDGES, torch.tensor([480.0, 1e9, 1e-30, 2.0**-149, 2.0**-126, torch.inf, torch.nan])))


def codes_of(x: torch.Tensor) -> torch.Tensor:
    return fp8_kernels.codes_of(x, launch)


def encoded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return fp8_kernels.encoded(x, launch)


def decoded(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return fp8_kernels.decoded(codes, scales, dtype, launch)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit by bit, but for the bits of NaN."""
    integers = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return bool(((left.view(integers) == right.view(integers)) | (left.isnan() & right.isnan())).all())


def test_numbers_become_the_codes_that_torch_gives_them():
    """Neighbours in float32 of all values and of all midpoints are among them. Releases of torch differ in what is too
    large, so the largest stands in for it.
    """
    numbers = VALUES.nan_to_num().float().unique()
    numbers = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2, EDGES, -EDGES))
    bits = numbers.view(torch.int32)
    around = torch.cat([(bits + step).view(F32) for step in (-1, 0, 1)])
    anything = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(0)).int().view(F32)
    x = torch.cat((around, anything, torch.randn(20_000) * 30))
    expected = x.clamp(-448, 448).to(E4M3).view(torch.uint8)
    found = codes_of(x)
    is_nan = expected.view(E4M3).float().isnan()
    assert torch.equal(found.view(E4M3).float().isnan(), is_nan)
    assert torch.equal(found[~is_nan], expected[~is_nan])


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_codes_are_read_as_their_values_times_the_scale(dtype):
    """All codes but NaN, which no row has, at all scales that rows have: torch and float64 are the judges."""
    numbers, codes = VALUES[~VALUES.isnan()], torch.arange(256)[~VALUES.isnan()].to(torch.uint8)
    powers = torch.arange(fp8.MIN_POWER, 120)
    expected = numbers * torch.tensor([2.0**power for power in powers.tolist()], dtype=torch.float64)[:, None]
    rows, scales = codes.expand(expected.shape).contiguous(), (powers + fp8.BIAS).to(torch.uint8)
    assert same(decoded(rows, scales, dtype), expected.to(dtype))
    assert same(fp8.decoded(rows, scales, dtype), expected.to(dtype))


def best_rows(row: torch.Tensor, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    """By the definition alone: the least power of two at which every element has a code next to it, and those codes'
    values. Ties go to codes with an even last bit.
    """
    grid = VALUES[:127]  # ascending, from 0 to 448
    for power in range(-127, fp8.most_power(dtype) + 1):
        size = row.double().abs() * 2.0**-power
        if size.max() <= 464 or power == fp8.most_power(dtype):
            break
    distance = (size[:, None] - grid).abs()
    is_near = distance == distance.min(1, keepdim=True).values
    codes = torch.where(is_near, torch.arange(127) + 1000 * (torch.arange(127) % 2), 9999).min(1).values % 1000
    return power, grid[codes].copysign(row.double()) * 2.0**power


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    """Of any magnitude, with elements at the edges of the codes, zeros, and numbers that the dtype hardly holds."""
    dtype = draw(st.sampled_from((BF16, F16, F32)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    spread = torch.randint(-12, 1, (draw(st.sampled_from((64, 80, 96, 128))),), generator=generator)
    row = torch.randn(len(spread), generator=generator).double() * torch.exp2(spread.double())
    least, most = (-24, 16) if dtype == F16 else (-149, 127)
    row *= 2.0 ** draw(st.one_of(st.integers(-8, 8), st.integers(least, most)))
    largest = torch.finfo(dtype).max
    row = row.clamp(-largest, largest).to(dtype)
    if draw(st.booleans()):
        row[0] = draw(st.sampled_from((0.0, 464.0, 466.0, largest, -largest, torch.finfo(dtype).smallest_normal)))
    return torch.zeros_like(row) if draw(st.integers(0, 20)) == 0 else row


def check(row: torch.Tensor) -> None:
    codes, scales = encoded(row[None])
    expected, expected_scales = fp8.encoded(row[None])
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected)
    power, values = best_rows(row, row.dtype)
    assert int(scales[0]) == power + fp8.BIAS
    read = decoded(codes, scales, row.dtype)
    assert torch.equal(read[0].double(), values), "and so nothing is rounded when it is read"
    assert same(read, fp8.decoded(codes, scales, row.dtype))


@settings(max_examples=examples(60), deadline=None)
@given(rows())
def test_a_row_is_stored_as_the_format_says_and_read_without_rounding(row):
    check(row)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_the_smallest_and_the_largest_rows(dtype):
    limits = torch.finfo(dtype)
    steps = torch.tensor([0, 1, 3, 5, 9, 17, 100], dtype=torch.float64)
    least = limits.smallest_normal * limits.eps
    for first in (least, limits.smallest_normal):
        check((first + steps * least).to(dtype).repeat(4))
    check(torch.tensor([limits.max, 1.0, -limits.max / 2, 0.0], dtype=dtype).repeat(4))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_has_lost_its_numbers_is_read_as_none(dtype, broken):
    rows = torch.randn(3, 64).to(dtype)
    rows[1, 17] = broken
    for codes, scales in (encoded(rows), fp8.encoded(rows)):
        assert (scales == fp8.BROKEN).tolist() == [False, True, False]
        for read in (decoded(codes, scales, dtype), fp8.decoded(codes, scales, dtype)):
            assert read[1].isnan().all()
            assert read[::2].isfinite().all()


def test_the_error_of_a_row_is_that_of_four_bits():
    """Half of the last place of numbers that are not much smaller than the row's largest."""
    row = torch.rand(1, 4096).add(0.5).to(BF16)
    read = fp8.decoded(*fp8.encoded(row), BF16)
    assert ((read - row).abs() / row.abs()).max() <= 2.0**-4
