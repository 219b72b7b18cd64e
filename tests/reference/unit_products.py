"""Products of quantized weights with quantized inputs: a plain loop over units in numpy, by the rule that
`worker/executors/cpu/native/units.h` states.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

UNIT, LINE, FAR = 32, 4, 128
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class UnitWeight:
    """A weight in units."""

    bits: int
    codes: Ints
    """[outputs, units, 32], from 0 on."""
    scales: Floats
    """[outputs, units]; numbers that the type of the scales holds."""
    zeros: Ints | None = None
    """[outputs, units]; None: the middle of the codes, unless there are minima."""
    minima: Floats | None = None
    halves: Ints | None = None
    """[outputs, units, 2], what the scale is multiplied by for either half; None: one."""

    @property
    def zero_points(self) -> Ints:
        if self.minima is not None:
            return np.zeros(self.scales.shape, dtype=np.int64)
        middle = np.full(self.scales.shape, 1 << (self.bits - 1), dtype=np.int64)
        return middle if self.zeros is None else self.zeros

    def numbers(self) -> Floats:
        """[outputs, inputs]: what the codes stand for, each operation rounded by itself."""
        scales = self.scales[..., None]
        if self.halves is not None:
            scales = (self.halves.astype(np.float32) * scales).repeat(UNIT // 2, -1)
        numbers = (self.codes - self.zero_points[..., None]).astype(np.float32) * scales
        numbers = numbers if self.minima is None else numbers + self.minima[..., None]
        return numbers.reshape(len(self.codes), -1)

    def units(self, first: int, last: int) -> "UnitWeight":
        parts = {name: getattr(self, name) for name in ("codes", "scales", "zeros", "minima", "halves")}
        return replace(self, **{name: part if part is None else part[:, first:last] for name, part in parts.items()})


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c in float32, rounded once: the sum in float64 is rounded to odd, which makes the second one right."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = np.broadcast_to(c.astype(np.float64), product.shape)
    with np.errstate(invalid="ignore"):  # of NaN
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & (bits % 2 == 0) & np.isfinite(total), bits + toward, bits)
    return odd.view(np.float64).astype(np.float32)


def quantized(x: Floats) -> tuple[Ints, Floats]:
    """Rows [rows, units, 32] -> whole numbers of 8 bits, in far lines of 15, and each unit's scale [rows, units]."""
    lines = np.abs(x).reshape(*x.shape[:-1], UNIT // LINE, LINE).max(-1).astype(np.float32)
    largest = lines.max(-1)  # NaN where there is one
    finite = np.isfinite(largest) & (largest >= np.float32(2.0**-100))
    np.put_along_axis(lines, lines.argmax(-1)[..., None], 0, -1)
    rest = lines.max(-1)
    base = np.where(largest >= 2 * rest, np.maximum(rest, largest / np.float32(FAR)), largest)
    safe = np.where(finite, base, np.float32(1))
    factor = np.float32(127) / safe
    q = np.where(finite[..., None], np.rint(np.where(finite[..., None], x, 0) * factor[..., None]), 0)
    scale = np.where(finite, safe / np.float32(127), np.where(np.isfinite(largest), 0, np.nan))
    return q.astype(np.int64), scale.astype(np.float32)


def unit_products(x: Floats, weight: UnitWeight, slices: int = 1) -> Floats:
    """x [rows, inputs] times a weight [outputs, inputs]: slices of units, added as a binary tree over their numbers."""
    x = x.reshape(len(x), -1, UNIT)
    q, scale = quantized(x)
    each = q.shape[1] // slices
    parts = []
    for first in range(0, each * slices, each):
        units = slice(first, first + each)
        parts.append(_slice_product(q[:, units], scale[:, units], weight.units(first, first + each)))
    while len(parts) > 1:
        left = parts[-1:] if len(parts) % 2 else []
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + left
    return parts[0]


def _slice_product(q: Ints, scale: Floats, weight: UnitWeight) -> Floats:
    total = np.zeros((len(q), len(weight.codes)), dtype=np.float32)
    sums = q.sum(-1)  # of minima
    for u in range(q.shape[1]):
        if weight.minima is not None:
            scaled_sum = scale[:, u] * sums[:, u].astype(np.float32)
            total = fma(weight.minima[None, :, u], scaled_sum[:, None], total)
        codes = weight.codes[:, u] - weight.zero_points[:, u, None]
        if weight.halves is not None:
            codes = codes * weight.halves[:, u].repeat(UNIT // 2, -1)
        whole = q[:, u] @ codes.T
        total = fma(whole.astype(np.float32), scale[:, u, None] * weight.scales[None, :, u], total)
    return total
