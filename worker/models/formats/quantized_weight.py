"""Quantized weight of one module: codes, scales and zero points, in the one form that every format is brought to.

A number is (code - zero point) * scale in float32, rounded once to the type that is served. A rank's share is a range
of outputs and inputs: each input finds its group in the whole weight's scales, wherever the share is cut.
"""

from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.coded import SCALE_TYPES, UNIT, CodedRows, CodeForm, CodeKind, Offset, UnitForm, Units
from holdfast.worker.executors.stored_matrix import BytesAndScales, StoredMatrix
from holdfast.worker.models.formats.codes import Codes, PlainCodes, UnsignedCodes

_MAX_RUNS: Final = 1024
"""Most runs of inputs of one group. More are an order of activations, whose scales are gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight(StoredMatrix):
    """A weight [out, in], or a range of its rows and columns."""

    codes: Codes
    scales: Tensor
    """[blocks of outputs, groups of inputs] of the whole weight, of any floating type."""
    zeros: Tensor | None
    """Zero points, float32, of the shape of `scales`. None: zero."""
    block_rows: int
    """Outputs that share a scale."""
    groups: Tensor
    """[inputs of the whole weight], int64: the group of each."""
    is_in_file: bool = True
    """The codes lie in a file, and were not made here."""
    made_of: StoredMatrix | None = None
    """See `StoredMatrix`."""

    @property
    def mapped(self) -> Tensor:
        return self.codes.stored

    @property
    def can_be_read_again(self) -> bool:
        return self.is_in_file

    def numbers(self, first: int, last: int) -> Tensor:
        numbers = self.codes.read((first, last), self.columns)
        blocks = torch.arange(first, last) // self.block_rows
        groups = self._unit_groups() if self.scales.shape[1] > 1 else None
        if groups is not None:  # sixteen times as quick as a gathered scale for each number
            of_units = numbers.view(last - first, len(groups), UNIT)
            if self.zeros is not None:
                of_units -= self._of_units(self.zeros, first, last, groups)[:, :, None]
            of_units *= self._of_units(self.scales, first, last, groups).float()[:, :, None]
            return numbers
        if self.zeros is not None:
            numbers = numbers - self._spread(self.zeros, blocks)
        return numbers * self._spread(self.scales, blocks)

    def bytes_and_scales(self, first: int, last: int) -> BytesAndScales | None:
        groups = self.groups[slice(*self.columns)].numpy()
        ends = np.append(np.flatnonzero(np.diff(groups)) + 1, len(groups))
        if not isinstance(self.codes, PlainCodes) or len(ends) > _MAX_RUNS:
            return None
        blocks, at = torch.arange(first, last) // self.block_rows, torch.from_numpy(ends) - 1
        scales = self._spread(self.scales, blocks, at).contiguous()
        zeros = torch.zeros_like(scales) if self.zeros is None else self._spread(self.zeros, blocks, at).contiguous()
        codes = self.codes.stored[first:last, slice(*self.columns)]
        return BytesAndScales(codes=codes, ends=ends, scales=scales, zeros=zeros)

    @property
    def unit_form(self) -> UnitForm | None:
        codes = self.codes.unsigned
        if codes is None or self.scales.dtype not in SCALE_TYPES or self._unit_groups() is None:
            return None
        if not self._zeros_fit(codes):
            return None
        return UnitForm(bits=codes.bits, offset=self._offset(codes), scales=self.scales.dtype)

    @property
    def lies_in_units(self) -> bool:
        codes = self.codes.unsigned
        return codes is not None and codes.lie_in_units

    def units(self, first: int, last: int) -> Units:
        codes, groups = self.codes.unsigned, self._unit_groups()
        if codes is None or groups is None:
            raise ValueError("a weight that is not in units has none")
        offsets = None
        if self._offset(codes) is Offset.ZERO_POINTS:
            zeros = torch.zeros(()) if self.zeros is None else self._of_units(self.zeros, first, last, groups)
            offsets = (zeros + codes.middle).to(torch.uint8).expand(last - first, len(groups)).contiguous()
        return Units(
            codes=codes.of_units((first, last), self.columns),
            scales=self._of_units(self.scales, first, last, groups),
            offsets=offsets,
        )

    def _of_units(self, grid: Tensor, first: int, last: int, groups: Tensor) -> Tensor:
        """Values of these groups of some rows, each row in one piece; consecutive groups are sliced, which is quick."""
        rows = grid[first:last] if self.block_rows == 1 else grid[torch.arange(first, last) // self.block_rows]
        if grid.shape[1] == 1:
            return rows.expand(-1, len(groups)).contiguous()
        start = int(groups[0])
        follow = groups.equal(torch.arange(start, start + len(groups)))
        own = rows[:, start : start + len(groups)] if follow else rows[:, groups]
        return own if own.stride(1) == 1 else own.contiguous()

    @property
    def code_form(self) -> CodeForm | None:
        scales = self.scales.dtype if self.scales.dtype in SCALE_TYPES else torch.float32
        codes, floating = self.codes.unsigned, self.codes.floating
        if codes is not None and not self._zeros_fit(codes):
            return None
        if codes is not None:
            kind = CodeKind.FOUR_BITS if codes.bits == 4 else CodeKind.EIGHT_BITS
            return CodeForm(kind=kind, offset=self._offset(codes), scales=scales)
        if floating is None or self.zeros is not None:
            return None
        return CodeForm(kind=floating.kind, offset=Offset.MIDDLE, scales=scales)

    @property
    def input_groups(self) -> Tensor:
        return self._used_groups()[1]

    def coded(self, first: int, last: int) -> CodedRows:
        form, codes, floating = self.code_form, self.codes.unsigned, self.codes.floating
        used, _ = self._used_groups()
        if form is None:
            raise ValueError("a weight that is not stored as codes has none")
        blocks = torch.arange(first, last)[:, None] // self.block_rows
        offsets = None
        if form.offset is Offset.ZERO_POINTS:
            assert codes is not None, "floating-point codes have no zero points"
            zeros = torch.zeros(1, 1) if self.zeros is None else self.zeros[blocks, used]
            offsets = (zeros + codes.middle).to(torch.uint8).expand(last - first, len(used))
        ranges = (first, last), self.columns
        if codes is not None:
            stored = codes.read_unsigned(*ranges)
        else:
            assert floating is not None, "the form says so"
            stored = floating.read_bits(*ranges)
        return CodedRows(codes=stored, scales=self.scales[blocks, used].to(form.scales), offsets=offsets)

    def _used_groups(self) -> tuple[Tensor, Tensor]:
        """Groups of the whole weight that the range's columns have, and the place among these of each column."""
        used, places = np.unique(self.groups[slice(*self.columns)].numpy(), return_inverse=True)
        return torch.from_numpy(used), torch.from_numpy(places)

    def _zeros_fit(self, codes: UnsignedCodes) -> bool:
        """Whether zero points, counted as unsigned codes are, have eight bits: GPTQ's first version may say 256."""
        if self.zeros is None:
            return True
        return bool(self.zeros.min() >= -codes.middle and self.zeros.max() <= 255 - codes.middle)

    def _offset(self, codes: UnsignedCodes) -> Offset:
        has_own = self.zeros is not None or codes.middle != 1 << (codes.bits - 1)
        return Offset.ZERO_POINTS if has_own else Offset.MIDDLE

    def _unit_groups(self) -> Tensor | None:
        """[units]: the group of each unit of the range's columns; None where a unit is cut, or has several groups."""
        if any(column % UNIT for column in self.columns):
            return None
        groups = self.groups[slice(*self.columns)].view(-1, UNIT)
        return groups[:, 0] if bool((groups == groups[:, :1]).all()) else None

    def _spread(self, grid: Tensor, blocks: Tensor, at: Tensor | None = None) -> Tensor:
        """The value for each number of some rows, or for those in some of the range's columns; one column where all
        inputs share it.
        """
        of_rows = grid[blocks].float()
        if grid.shape[1] == 1:
            return of_rows
        groups = self.groups[slice(*self.columns)]
        return of_rows[:, groups if at is None else groups[at]]


@dataclass(frozen=True, slots=True)
class TransposedExperts:
    """Weights of experts that are kept as [expert, in, out], and quantized as [expert, out, in]."""

    weight: QuantizedWeight
    """[expert x out, in]."""
    shape: tuple[int, int, int]

    def to(self, dtype: torch.dtype) -> Tensor:
        """Numbers [expert, in, out], each rounded once, in separate memory."""
        experts, inputs, outputs = self.shape
        assert self.weight.shape == (experts * outputs, inputs), prod(self.shape)
        return self.weight.to(dtype).view(experts, outputs, inputs).transpose(1, 2)
