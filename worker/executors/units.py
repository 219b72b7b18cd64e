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

SCALE_TYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
"""Of scales and minima."""


class Offset(IntEnum):
    """What a code is counted from; the order is that of `native/decoder.h`."""

    MIDDLE = 0
    """The middle of the codes: 8 or 128."""
    ZERO_POINTS = 1
    """A zero point of each unit."""
    MINIMA = 2
    """Zero; a minimum of each unit is added to what is scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitForm:
    """How the units of a weight lie."""

    bits: int
    """Of a code: 4 or 8."""
    offset: Offset
    scales: torch.dtype
    """One of `SCALE_TYPES`."""

    @property
    def panel_unit_bytes(self) -> int:
        """Of one unit of 32 outputs, packed."""
        beside = {Offset.MIDDLE: 0, Offset.ZERO_POINTS: 1, Offset.MINIMA: self.scales.itemsize}[self.offset]
        return UNIT * (UNIT * self.bits // 8 + self.scales.itemsize + beside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Units of some rows of a weight."""

    codes: Tensor
    """[rows, inputs], uint8."""
    scales: Tensor
    """[rows, units], of the form's type."""
    offsets: Tensor | None
    """[rows, units]: zero points, uint8, or minima, of the scales' type; None where the form has neither."""
