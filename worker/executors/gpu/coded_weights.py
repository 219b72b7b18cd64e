"""Quantized weights on a device: the codes of stored matrices, stacked and packed as kernels read them."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.coded import CodedMatrix, CodedRows, CodeForm, CodeKind
from holdfast.worker.executors.finite import check_finite
from holdfast.worker.executors.mapped_files import discard_contents
from holdfast.worker.executors.stored_matrix import AT_ONCE, StoredMatrix, for_all
from holdfast.worker.executors.units import UNIT, Offset

WIDEST_TILE: Final = 256
"""Inputs of the widest tile of a product: a power of two."""

_FEWEST_TOGETHER: Final = 16
"""Inputs with one scale that follow each other; where there are fewer, each input names its group."""


def coded_on(device: torch.device, parts: Sequence[StoredMatrix], num_slices: int) -> CodedMatrix:
    """Copies matrices of one form, and with the same groups of inputs, as one. Inputs are summed in so many slices."""
    form, groups = parts[0].code_form, parts[0].input_groups
    assert form is not None, "weights without a form are dequantized"
    slice_inputs = len(groups) // num_slices
    group_inputs = inputs_together(groups, slice_inputs)
    order = groups[::group_inputs] if group_inputs else None
    matrix = _Matrix(form, len(groups), sum(map(len, parts)), slice_inputs, order, int(groups.max()) + 1, device)
    row = 0
    for part in parts:
        matrix.fill(row, part)
        row += len(part)
    return CodedMatrix(
        form=matrix.form,
        num_inputs=len(groups),
        codes=matrix.codes,
        scales=matrix.scales,
        offsets=matrix.offsets,
        group_inputs=group_inputs,
        groups=None if group_inputs else groups.to(device, torch.int32),
    )


def inputs_together(groups: Tensor, slice_inputs: int) -> int:
    """Inputs that a tile takes together, by the group of each: as `CodedMatrix.group_inputs`."""
    ends = (groups[1:] != groups[:-1]).nonzero().flatten() + 1
    if not len(ends):
        return len(groups)
    together = gcd(slice_inputs, *map(int, ends))
    if together % WIDEST_TILE == 0:
        return together
    together = gcd(together, WIDEST_TILE)
    return together if together >= _FEWEST_TOGETHER else 0


class _Matrix:
    """The tensors of one matrix on a device, filled piece by piece."""

    def __init__(
        self,
        form: CodeForm,
        num_inputs: int,
        num_outputs: int,
        slice_inputs: int,
        order: Tensor | None,
        num_groups: int,
        device: torch.device,
    ) -> None:
        self._is_packed = form.kind is CodeKind.FOUR_BITS and slice_inputs % UNIT == 0
        self._adds = 0
        if form.kind is CodeKind.FOUR_BITS and not self._is_packed:
            form = replace(form, kind=CodeKind.EIGHT_BITS)
            self._adds = 120 if form.offset is Offset.MIDDLE else 0  # from the middle of one to that of the other
        self.form, self._order = form, order
        shape = num_outputs, num_groups if order is None else len(order)
        if self._is_packed:
            self.codes = torch.empty((num_outputs, num_inputs // 8), dtype=torch.int32, device=device)
        else:
            self.codes = torch.empty((num_outputs, num_inputs), dtype=torch.uint8, device=device)
        self.scales = torch.zeros(shape, dtype=form.scales, device=device)
        kind = {Offset.MIDDLE: None, Offset.ZERO_POINTS: torch.uint8, Offset.MINIMA: form.scales}[form.offset]
        self.offsets = None if kind is None else torch.zeros(shape, dtype=kind, device=device)

    def fill(self, row: int, part: StoredMatrix) -> None:
        """Puts a matrix at its rows from `row` on; rows of padding are zeros."""
        first, last = part.rows
        step = max(1, AT_ONCE // max(1, part.num_rows_columns[1]))

        def put(start: int) -> None:
            self._put(row + start - first, part.coded(start, min(last, start + step)))

        for_all(put, range(first, last, step))
        self.codes[row + last - first : row + len(part)] = 0
        discard_contents(part.mapped)

    def _put(self, row: int, rows: CodedRows) -> None:
        place = slice(row, row + len(rows.codes))
        if self.form.kind is CodeKind.E4M3 and bool((rows.codes & 0x7F == 0x7F).any()):
            raise ConfigurationError("a weight in fp8 has codes that stand for NaN; fetch its file again")
        codes = rows.codes + self._adds if self._adds else rows.codes
        self.codes[place] = in_words(codes) if self._is_packed else codes
        check_finite(rows.scales)
        self.scales[place] = self._in_order(rows.scales)
        if self.offsets is not None:
            assert rows.offsets is not None, "a form says what it has"
            check_finite(rows.offsets)
            self.offsets[place] = self._in_order(rows.offsets)

    def _in_order(self, grid: Tensor) -> Tensor:
        """[rows, groups] -> [rows, those of the inputs that are taken together]"""
        return grid if self._order is None else grid[:, self._order]


def in_words(codes: Tensor) -> Tensor:
    """Codes of four bits [rows, inputs], uint8 -> words [rows, inputs / 8], int32, as `CodedMatrix` has them."""
    places = codes.to(torch.int32).view(len(codes), -1, 4, 4, 2)  # unit, s, t, h
    shifts = (4 * torch.arange(4, dtype=torch.int32))[:, None, None] + 16 * torch.arange(2, dtype=torch.int32)
    return (places << shifts).sum((2, 4), dtype=torch.int32).view(len(codes), -1)
