"""Products in units: the bits of the written rule, for every form, class, and number of rows and threads."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.worker.executors.coded import UNITS_TOGETHER, Offset, UnitForm, Units
from holdfast.worker.executors.cpu.library import runnable_classes
from holdfast.worker.executors.cpu.linear_structures import NativeLinear
from holdfast.worker.executors.cpu.packed_rows import IntArray, gate_and_up, padded_places
from holdfast.worker.executors.cpu.part_packing import TILE
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.stored_matrix import StoredMatrix
from tests.reference.unit_products import UNIT, UnitWeight, fma, quantized, unit_products
from tests.worker.executors.cpu.native import ALL, BF16, F16, F32, Product, library_or_skip, same_bits
from tests.worker.executors.cpu.unit_weights import weight_of_units

FORMS = [
    *(UnitForm(bits=4, offset=offset, scales=F16) for offset in (Offset.MIDDLE, Offset.ZERO_POINTS, Offset.MINIMA)),
    *(UnitForm(bits=5, offset=offset, scales=F16) for offset in (Offset.MIDDLE, Offset.MINIMA)),
    *(UnitForm(bits=8, offset=offset, scales=F16) for offset in (Offset.MIDDLE, Offset.ZERO_POINTS)),
    *(UnitForm(bits=bits, offset=Offset.BYTE_MINIMA, scales=F16, before=bits - 4) for bits in (4, 5)),
    UnitForm(bits=6, offset=Offset.BYTE_HALVES, scales=F16, before=6),
]
OTHER_SCALES = [UnitForm(bits=4, offset=Offset.MINIMA, scales=scales) for scales in (BF16, F32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredUnits(StoredMatrix):
    """Units in memory, as a loader would find them in a file."""

    form: UnitForm
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    factors: Tensor | None

    @property
    def mapped(self) -> Tensor:
        return torch.empty(0)

    @property
    def unit_form(self) -> UnitForm:
        return self.form

    def numbers(self, first: int, last: int) -> Tensor:
        return torch.from_numpy(weight_of(self).numbers()[first:last])

    def units(self, first: int, last: int) -> Units:
        offsets, factors = (None if part is None else part[first:last] for part in (self.offsets, self.factors))
        return Units(codes=self.codes[first:last], scales=self.scales[first:last], offsets=offsets, factors=factors)


def stored_units(form: UnitForm, outputs: int, num_units: int, seed: int = 0) -> StoredUnits:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(outputs, num_units, generator=generator).sub_(0.5).to(form.scales)
    offsets = factors = None
    if form.offset.num_factors:
        together = -(-(form.before + num_units) // UNITS_TOGETHER)
        factors = torch.rand(outputs, together, form.offset.num_factors, generator=generator).sub_(0.5).to(F16)
        of_bytes = (-128, 128, torch.int8) if form.offset is Offset.BYTE_HALVES else (0, 64, torch.uint8)
        scales, offsets = (
            torch.randint(*of_bytes[:2], scales.shape, generator=generator).to(of_bytes[2]) for _ in range(2)
        )
        scales[0] = -128 if form.offset is Offset.BYTE_HALVES else 63
    if form.offset is Offset.ZERO_POINTS:
        offsets = torch.randint(17 if form.bits == 4 else 256, scales.shape, generator=generator).to(torch.uint8)
    if form.offset is Offset.MINIMA:
        offsets = torch.rand(scales.shape, generator=generator).sub_(0.5).to(form.scales)
    codes = torch.randint(1 << form.bits, (outputs, num_units * UNIT), generator=generator).to(torch.uint8)
    codes[0] = codes.max()  # nothing overflows
    rows, columns = (0, outputs), (0, num_units * UNIT)
    parts = {"codes": codes, "scales": scales, "offsets": offsets, "factors": factors}
    return StoredUnits(rows=rows, columns=columns, form=form, **parts)  # type: ignore[arg-type]


def weight_of(stored: StoredUnits) -> UnitWeight:
    """The same for the reference."""
    return weight_of_units(stored.form, stored.units(*stored.rows))


class UnitProduct(Product):
    """A product with a weight in units, for rows of a model's type."""

    def _linear(self, linear: Linear, *, slices: int = 1, rows: IntArray | None = None) -> NativeLinear:
        return super()._linear(Linear(units=self._stored), slices=slices, rows=rows)

    def __init__(
        self,
        name: str | None,
        *stored: StoredUnits,
        slices: int = 1,
        dtype: torch.dtype = BF16,
        rows: IntArray | None = None,
    ) -> None:
        self._stored = stored
        shape = sum(map(len, stored)), stored[0].shape[1]
        super().__init__(library_or_skip(name), torch.empty(shape, dtype=dtype), slices, rows)


def inputs(rows: int, length: int, dtype: torch.dtype = BF16, seed: int = 1) -> Tensor:
    """Of many sizes; the largest of the first row's first unit is what all q of it are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, generator=generator) * torch.logspace(-3, 2, rows)[:, None]
    x[0, :UNIT] = 3.0
    return x.to(dtype)


def expected(x: Tensor, stored: StoredUnits, slices: int = 1) -> Tensor:
    return torch.from_numpy(unit_products(x.float().numpy(), weight_of(stored), slices))


SHAPES = st.tuples(
    st.one_of(st.integers(1, 33), st.sampled_from([256, 257])),  # rows
    st.integers(1, 5),  # units of a slice
    st.integers(1, 150),  # outputs
    st.sampled_from([1, 2, 3, 5]),  # slices
)


@pytest.mark.parametrize("form", [*FORMS, *OTHER_SCALES], ids=str)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_products_have_the_bits_of_the_rule(form, shape, seed):
    rows, units, outputs, slices = shape
    stored = stored_units(form, outputs, units * slices, seed)
    x = inputs(rows, stored.shape[1], seed=seed)
    want = expected(x, stored, slices)
    for name in runnable_classes():
        assert same_bits(UnitProduct(name, stored, slices=slices)(x), want), name


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_all_classes_and_numbers_of_rows_have_the_same_bits(name, form):
    stored = stored_units(form, 70, 6)
    x = inputs(33, stored.shape[1])
    product, want = UnitProduct(name, stored, slices=3), expected(x, stored, slices=3)
    for rows in range(1, 34):
        assert same_bits(product(x[:rows]), want[:rows]), rows


@pytest.mark.parametrize("name", ALL)
def test_parts_of_other_forms_have_the_bits_that_they_have_apart(name):
    """Stacked as queries, keys and values are; and in turns of a panel, as gates and ups."""
    parts = [stored_units(form, 64, 6, seed) for seed, form in enumerate([*FORMS, *OTHER_SCALES])]
    x = inputs(33, parts[0].shape[1])
    x[:, 70] *= 40  # a far line
    want = [expected(x, part, slices=3) for part in parts]
    stacked = UnitProduct(name, *parts, slices=3)
    assert stacked.native.panels
    for rows in (1, 2, 7, 33):
        assert same_bits(stacked(x[:rows]), torch.cat(want, 1)[:rows])
    for first, second in itertools.pairwise(range(len(parts))):
        rows = gate_and_up(padded_places(64, 2, TILE), 64, TILE)
        in_turns = torch.stack([want[part].view(33, 2, TILE) for part in (first, second)], 2).flatten(1)
        assert same_bits(UnitProduct(name, parts[first], parts[second], slices=3, rows=rows)(x), in_turns)


def test_parts_of_other_forms_share_no_panel():
    with pytest.raises(AssertionError, match="share no panel"):
        UnitProduct(None, stored_units(FORMS[0], 48, 2), stored_units(FORMS[1], 64, 2))


@pytest.mark.parametrize("dtype", [F16, F32])
def test_rows_of_the_plain_types_are_quantized_as_they_are(dtype):
    stored = stored_units(FORMS[0], 64, 4)
    x = inputs(9, stored.shape[1], F32)
    assert same_bits(UnitProduct(None, stored, dtype=dtype)(x), expected(x, stored))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_long_rows_have_the_bits_of_the_rule(form):
    """Of more units than are unpacked at a time, with far lines in all of them."""
    stored = stored_units(form, 70, 75)
    x = inputs(11, stored.shape[1]).view(11, 75, UNIT)
    for row in range(11):
        x[row, row::3, (5 * row) % UNIT] *= 90.0
    x = x.view(11, -1)
    want = expected(x, stored)
    for name in runnable_classes():
        assert same_bits(UnitProduct(name, stored)(x), want), name


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_far_lines_have_the_bits_of_the_rule(name, form):
    """Wherever in a unit they lie, however far they are, and where two lines have the largest input."""
    stored = stored_units(form, 70, 10)
    x = inputs(40, stored.shape[1]).view(40, 10, UNIT)
    for row in range(32):
        x[row, :, row] *= torch.tensor([-1.0, 2.0, 3.0, -20.0, 50.0, -127.0, 129.0, 300.0, 1.0, 1.0])
        x[row, 8] = 2.0**-120
        x[row, 8, row] = -1.0
        x[row, 9, row] = x[row, 9, (row + 9) % UNIT] = 9 * x[row, 9].abs().max()
    x[33, 4, 9] = 1e30  # beside which all else is nothing
    x = x.view(40, -1)
    assert same_bits(UnitProduct(name, stored)(x), expected(x, stored))


def test_odd_inputs_have_the_bits_of_the_rule():
    """NaN and infinity make all of a row NaN; what is below 2^-100 is zero; and no row touches another."""
    stored = stored_units(FORMS[2], 64, 4)
    x = inputs(12, stored.shape[1], F32)
    x[1, 70], x[2, 3], x[3, 127] = torch.nan, torch.inf, -torch.inf
    x[4], x[5], x[6, :32] = 0.0, 2.0**-101, 2.0**-100
    x[7], x[8] = 1e30, 1e-39
    want = expected(torch.where(x.abs() < 2.0**-126, 0.0, x), stored)
    got = UnitProduct(None, stored, dtype=F32)(x)
    assert torch.equal(got.isnan(), want.isnan())
    assert got[1:4].isnan().all()
    assert got[[4, 5, 8]].eq(0).all()
    assert same_bits(got.nan_to_num(), want.nan_to_num())


def test_a_product_is_near_that_of_the_numbers():
    """The rule is worth it: its error is that of 8 bits."""
    for form in FORMS:
        stored = stored_units(form, 64, 16)
        x = inputs(8, stored.shape[1])
        exact = x.double() @ stored.numbers(0, 64).double().T
        error = (UnitProduct(None, stored)(x).double() - exact).norm(dim=1) / exact.norm(dim=1)
        assert (error < 0.01).all(), (form, error)


# --- the reference itself, and mistakes that it would notice ---


def test_the_reference_adds_as_fused_multiply_adds_do():
    from fractions import Fraction

    random = np.random.default_rng(0)
    a, b, c = (
        random.standard_normal(500).astype(np.float32) * np.float32(2.0) ** random.integers(-20, 20, 500) for _ in "abc"
    )
    a, b, c = (part.astype(np.float32) for part in (a, b, c))
    for i, got in enumerate(fma(a, b, c)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        around = [np.nextafter(got, np.float32(side)) for side in (-np.inf, np.inf)]
        assert all(abs(Fraction(float(got)) - exact) <= abs(Fraction(float(other)) - exact) for other in around)


def test_quantized_rows_are_within_half_a_step():
    x = inputs(9, 128, F32).numpy().reshape(9, -1, UNIT)
    x[:, 1, 5] *= 50  # a large input, and its line, are as exact
    q, scale = quantized(x)
    assert 127 * 20 < np.abs(q).max() <= 127 * 128
    assert (np.sort(np.abs(q), -1)[..., -5] <= 127).all()
    assert (np.abs(q * scale[..., None] - x) <= scale[..., None] * 0.5001).all()


def swapped_halves(weight: UnitWeight) -> UnitWeight:
    return replace(
        weight, codes=weight.codes.reshape(*weight.codes.shape[:2], 2, 16)[:, :, ::-1].reshape(weight.codes.shape)
    )


MISTAKES: dict[str, tuple[int, Callable[[UnitWeight], UnitWeight]]] = {
    "a zero point off by one": (1, lambda w: replace(w, zeros=w.zero_points + 1)),
    "the middle off by one": (0, lambda w: replace(w, zeros=w.zero_points + 1)),
    "halves of bytes swapped": (0, swapped_halves),
    "the scale of the unit beside": (0, lambda w: replace(w, scales=np.roll(w.scales, 1, axis=1))),
    "the minimum of the unit beside": (2, lambda w: replace(w, minima=np.roll(w.minima, 1, axis=1))),  # type: ignore[arg-type]
    "the minimum forgotten": (2, lambda w: replace(w, minima=np.zeros_like(w.scales))),
    "the middle of five bits off by one": (3, lambda w: replace(w, zeros=w.zero_points + 1)),
    "fifth bits forgotten": (4, lambda w: replace(w, codes=w.codes & 15)),
    "the minimum added": (7, lambda w: replace(w, minima=-w.minima)),  # type: ignore[operator]
    "the minimum of the eight units beside": (7, lambda w: replace(w, minima=np.roll(w.minima, 8, axis=1))),  # type: ignore[arg-type]
    "halves' scales swapped": (9, lambda w: replace(w, halves=w.halves[..., ::-1])),  # type: ignore[index]
    "sixth bits forgotten": (9, lambda w: replace(w, codes=w.codes & 31)),
    "the factor of the eight units beside": (9, lambda w: replace(w, scales=np.roll(w.scales, 8, axis=1))),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_out(mistake):
    form, plant = MISTAKES[mistake]
    stored = stored_units(FORMS[form], 64, 12)
    x = inputs(3, stored.shape[1])
    assert same_bits(UnitProduct(None, stored)(x), expected(x, stored))
    wrong = unit_products(x.float().numpy(), plant(weight_of(stored)))
    assert not same_bits(UnitProduct(None, stored)(x), torch.from_numpy(wrong))


def test_another_order_of_units_or_slices_has_other_bits():
    stored = stored_units(FORMS[0], 64, 6)
    x = inputs(3, stored.shape[1])
    backwards = replace(
        stored, codes=stored.codes.view(64, 6, UNIT).flip(1).reshape(64, -1), scales=stored.scales.flip(1)
    )
    got = UnitProduct(None, stored)(x)
    assert not same_bits(expected(x.view(3, 6, UNIT).flip(1).reshape(3, -1), backwards), got)
    assert not same_bits(expected(x, stored, slices=3), got)
