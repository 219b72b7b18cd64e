"""Units of quantized weights: 32 inputs of an output, whose codes have one scale.

They are multiplied with inputs that are quantized in units too; `cpu/native/units.h` states the rule.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

UNIT: Final = 32
"""Inputs of a unit, and outputs of a packed panel of units."""

LINE: Final = 4
"""Inputs of a line. That of a row's unit whose largest input is much larger than those of the other lines is far."""

FAR_FROM: Final = 2
"""Least ratio of the far line's largest input to that of all others."""

FAR: Final = 128
"""Largest ratio at which the far line does not coarsen the others."""

SCALE_TYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of scales and minima."""

UNITS_TOGETHER: Final = 8
"""Units that have factors in common, where a scale is a byte times a factor."""


class Offset(IntEnum):
    """Origin of a code; the order is that of `native/decoder.h`."""

    MIDDLE = 0
    """The middle of the codes: 8 or 128."""
    ZERO_POINTS = 1
    """A zero point of each unit."""
    MINIMA = 2
    """Zero; a minimum of each unit is added to what is scaled."""
    BYTE_MINIMA = 3
    """The same; scale and minimum of a unit are a byte each, times a factor of eight units, the minimum's negative."""
    BYTE_HALVES = 4
    """The middle; halves of a unit have scales of their own, a signed byte each, times a factor of eight units."""

    @property
    def num_factors(self) -> int:
        """Factors of eight units."""
        return {Offset.BYTE_MINIMA: 2, Offset.BYTE_HALVES: 1}.get(self, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitForm:
    """Form of a weight's units."""

    bits: int
    """Bits of a code: 4 or 8; 5 if it is counted from the middle or has a minimum; 6 with scales of halves."""
    offset: Offset
    scales: torch.dtype
    """One of `SCALE_TYPES`; float16, that of factors, where there are some."""
    before: int = 0
    """Units of the whole weight before the first one, modulo `UNITS_TOGETHER`; 0 without common factors."""

    def panel_bytes(self, num_units: int) -> int:
        """Bytes of so many units of 32 outputs, packed."""
        factors = self.offset.num_factors
        scale = 1 if factors else self.scales.itemsize
        beside = {Offset.MIDDLE: 0, Offset.MINIMA: self.scales.itemsize}.get(self.offset, 1)
        together = -(-(self.before + num_units) // UNITS_TOGETHER)
        return UNIT * (num_units * (UNIT * self.bits // 8 + scale + beside) + 2 * factors * together)


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Units of some rows of a weight."""

    codes: Tensor
    """[rows, inputs], uint8, or int8 where they are less by 128; or [rows, inputs / 2], uint8: of four bits, two in a
    byte, the first in the low ones.
    """
    scales: Tensor
    """[rows, units], of the form's type; bytes where they are times a factor, of whole units or of first halves."""
    offsets: Tensor | None
    """[rows, units]: zero points, uint8, or minima, of the scales' type, or bytes of minima or of second halves; None
    where codes are counted from the middle.
    """
    factors: Tensor | None = None
    """[rows, eight units, factors], float16, as eight are counted in the whole weight."""
