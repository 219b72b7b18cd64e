"""Quantized weight of one module: codes, scales and zero points, in the one form that every format is brought to.

A number is (code - zero point) * scale in float32, rounded once to the type that is served. A rank's share is a range
of outputs and inputs: each input finds its group in the whole weight's scales, wherever the share is cut.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.executors.units import SCALE_TYPES, UNIT, Offset, UnitForm, Units
from holdfast.worker.models.quantization.codes import Codes


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight(StoredMatrix):
    """A weight [out, in], or a range of its rows and columns."""

    codes: Codes
    scales: Tensor
    """[blocks of outputs, groups of inputs] of the whole weight, of any floating type."""
    zeros: Tensor | None
    """As `scales`, float32. None: zero."""
    block_rows: int
    """Outputs that share a scale."""
    groups: Tensor
    """[inputs of the whole weight], int64: the group of each."""

    @property
    def mapped(self) -> Tensor:
        return self.codes.stored

    def numbers(self, first: int, last: int) -> Tensor:
        numbers = self.codes.read((first, last), self.columns)
        blocks = torch.arange(first, last) // self.block_rows
        if self.zeros is not None:
            numbers = numbers - self._spread(self.zeros, blocks)
        return numbers * self._spread(self.scales, blocks)

    @property
    def unit_form(self) -> UnitForm | None:
        codes = self.codes.unsigned
        if codes is None or self.scales.dtype not in SCALE_TYPES or self._unit_groups() is None:
            return None
        has_own = self.zeros is not None or codes.middle != 1 << (codes.bits - 1)
        offset = Offset.ZERO_POINTS if has_own else Offset.MIDDLE
        return UnitForm(bits=codes.bits, offset=offset, scales=self.scales.dtype)

    def units(self, first: int, last: int) -> Units:
        codes, groups, form = self.codes.unsigned, self._unit_groups(), self.unit_form
        if codes is None or groups is None or form is None:
            raise ValueError("a weight that does not lie in units has none")
        blocks = torch.arange(first, last)[:, None] // self.block_rows
        offsets = None
        if form.offset is Offset.ZERO_POINTS:
            zeros = torch.zeros(()) if self.zeros is None else self.zeros[blocks, groups]
            offsets = (zeros + codes.middle).to(torch.uint8).expand(last - first, len(groups)).contiguous()
        return Units(
            codes=codes.read_unsigned((first, last), self.columns).contiguous(),
            scales=self.scales[blocks, groups],
            offsets=offsets,
        )

    def _unit_groups(self) -> Tensor | None:
        """[units]: the group of each unit of the range's columns; None where a unit is cut, or has several groups."""
        if any(column % UNIT for column in self.columns):
            return None
        groups = self.groups[slice(*self.columns)].view(-1, UNIT)
        return groups[:, 0] if bool((groups == groups[:, :1]).all()) else None

    def _spread(self, grid: Tensor, blocks: Tensor) -> Tensor:
        """The value for each number of some rows; one column where all inputs share it."""
        of_rows = grid[blocks].float()
        return of_rows if grid.shape[1] == 1 else of_rows[:, self.groups[slice(*self.columns)]]


@dataclass(frozen=True, slots=True)
class TransposedExperts:
    """Weights of experts that are kept as [expert, in, out], and quantized as [expert, out, in]."""

    weight: QuantizedWeight
    """[expert x out, in]."""
    shape: tuple[int, int, int]

    def to(self, dtype: torch.dtype) -> Tensor:
        """Its numbers [expert, in, out], each rounded once, in memory of their own."""
        experts, inputs, outputs = self.shape
        assert self.weight.shape == (experts * outputs, inputs), prod(self.shape)
        return self.weight.to(dtype).view(experts, outputs, inputs).transpose(1, 2)
