"""Quantized weights that stay codes in the kernels: description of a range of one, and its layout on a device.

A number is (code - offset) * scale, or code * scale + minimum, each operation rounded to float32, and then once to the
type that is served: what the weight is dequantized to.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from holdfast.worker.executors.units import Offset


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
    """One of `units.SCALE_TYPES`; of minima too."""


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
