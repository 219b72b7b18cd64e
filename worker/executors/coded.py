"""Quantized weights that stay codes in the kernels: description of a range of one, and its layout on a device.

A number is (code - offset) * scale, or code * scale + minimum, each operation rounded to float32, and then once to the
served dtype: the dequantized weight.

Codes can also be taken in units: 32 inputs of an output, whose codes have one scale. Units are multiplied with inputs
that are quantized in units too; `cpu/native/units.h` states the rule.
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
    """Zero; a minimum of each unit is added after scaling."""
    BYTE_MINIMA = 3
    """The same; scale and minimum of a unit are a byte each, times a factor of eight units, the minimum's negative."""
    BYTE_HALVES = 4
    """The middle; halves of a unit have separate scales, a signed byte each, times a factor of eight units."""

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
        """Bytes of this many units of 32 outputs, packed."""
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


class CodeKind(IntEnum):
    """Kind of a code; the order is that of `gpu/kernels/codes.py`."""

    FOUR_BITS = 1
    """A whole number from 0 to 15."""
    EIGHT_BITS = 2
    """A whole number from 0 to 255."""
    E4M3 = 3
    E5M2 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeForm:
    """Form of a weight's codes; weights of equal forms can be stacked, if their inputs have the same groups."""

    kind: CodeKind
    offset: Offset
    """Offset of codes; `MIDDLE`, which is zero then, for floating-point codes."""
    scales: torch.dtype
    """One of `SCALE_TYPES`; of minima too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedRows:
    """Some rows of a weight."""

    codes: Tensor
    """[rows, inputs], uint8; of floating-point codes their bits."""
    scales: Tensor
    """[rows, groups], of the form's type."""
    offsets: Tensor | None
    """[rows, groups]: zero points, uint8, or minima, of the scales' type; None where the form has neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedMatrix:
    """A weight [out, in] on a device."""

    form: CodeForm
    num_inputs: int
    codes: Tensor
    """[out, in], uint8; codes of four bits [out, in / 8], int32: a unit of 32 inputs is four words, and input
    `8 s + 2 t + h` of it the four bits from `16 h + 4 s` on of word t."""
    scales: Tensor
    """[out, groups], as in `CodedRows`."""
    offsets: Tensor | None
    group_inputs: int
    """Successive inputs that share a scale: all of them, a power of two, or a multiple of 256. 0: each input's group is
    in `groups`."""
    groups: Tensor | None
    """[in], int32."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.codes), self.num_inputs

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        tensors = (self.codes, self.scales, self.offsets, self.groups)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
