"""Linears on a device: quantized weights stacked and packed as kernels read them, the tile that a number of rows gets,
and a kernel's arguments for a weight and its codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.coded import UNIT, CodedMatrix, CodedRows, CodeForm, CodeKind, Offset
from holdfast.worker.executors.finite import check_finite
from holdfast.worker.executors.gpu.kernels.codes import BY_TABLE, E4M3, EIGHT_BITS, FOUR_BITS, MINIMA, ZERO_POINTS
from holdfast.worker.executors.mapped_files import discard_contents
from holdfast.worker.executors.stored_matrix import AT_ONCE, StoredMatrix, for_all

WIDEST_TILE: Final = 256
"""Inputs of the widest tile of a product: a power of two."""

_FEWEST_TOGETHER: Final = 16
"""Inputs with one scale that follow each other; where there are fewer, each input names its group."""


def coded_on(device: torch.device, parts: Sequence[StoredMatrix], num_slices: int) -> CodedMatrix:
    """Copies matrices of one form, and with the same groups of inputs, as one. Number of slices in which inputs are
    summed.
    """
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
            assert rows.offsets is not None, "by the form's rules"
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


Weight = Tensor | StoredMatrix | CodedMatrix


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Tile of a linear: outputs and tokens of a program, inputs of a step of its loop."""

    outputs: int
    tokens: int
    inputs: int
    num_warps: int
    num_stages: int


_HALF_TILES: Final = (
    LinearTile(64, 16, 128, 4, 4),
    LinearTile(64, 32, 128, 4, 4),
    LinearTile(64, 64, 64, 4, 4),
    LinearTile(128, 128, 64, 8, 3),
)
_FOUR_BITS_TILE: Final = LinearTile(64, 16, WIDEST_TILE, 4, 3)
_INPUTS_BY_TABLE: Final = 64  # inputs of a tile whose codes are looked up in a table
_FLOAT_TILES: Final = (LinearTile(64, 16, 32, 4, 2), LinearTile(64, 64, 32, 4, 2))


def linear_tiles(dtype: torch.dtype) -> tuple[LinearTile, ...]:
    """All that are used, the narrowest first."""
    return _FLOAT_TILES if dtype == torch.float32 else _HALF_TILES


def linear_tile(num_rows: int, dtype: torch.dtype) -> LinearTile:
    """The narrowest that holds all rows, or the widest."""
    tiles = linear_tiles(dtype)
    return next((tile for tile in tiles if num_rows <= tile.tokens), tiles[-1])


def tile_for(weight: Weight, tile: LinearTile, slice_inputs: int) -> LinearTile:
    """The tile, with the inputs of a turn that suit codes: more of four bits for few rows, and fewer where each names
    its group, of which registers hold few.
    """
    if not isinstance(weight, CodedMatrix):
        return tile
    if weight.groups is not None:
        return replace(tile, inputs=min(tile.inputs, _INPUTS_BY_TABLE))
    is_packed = weight.codes.dtype == torch.int32
    return _FOUR_BITS_TILE if is_packed and tile == _HALF_TILES[0] and slice_inputs % WIDEST_TILE == 0 else tile


def weight_arguments(weight: Weight, inputs: int) -> dict[str, Any]:
    """A weight's arguments, for tiles of this many inputs."""
    if isinstance(weight, Tensor):
        nothing = {"scales": weight, "offsets": weight, "groups": weight, "num_groups": 0, "group_inputs": 0}
        return {"weight": weight, **nothing, "CODE": 0, "OFFSET": 0, "GROUP": 0}
    assert isinstance(weight, CodedMatrix), "stored matrices are copied to the device before"
    codes, num_groups = weight.codes, weight.scales.shape[1]
    together = inputs if num_groups == 1 else min(inputs, weight.group_inputs)
    return {
        "weight": codes,
        "scales": weight.scales,
        "offsets": codes if weight.offsets is None else weight.offsets,
        "groups": codes if weight.groups is None else weight.groups,
        "num_groups": num_groups,
        "group_inputs": weight.group_inputs,
        "CODE": int(weight.form.kind),
        "OFFSET": int(weight.form.offset),
        "GROUP": together if weight.groups is None else BY_TABLE.value,
    }


assert [FOUR_BITS.value, EIGHT_BITS.value, E4M3.value] == list(CodeKind)[:3], "kernels name kinds of codes alike"
assert (ZERO_POINTS.value, MINIMA.value) == (Offset.ZERO_POINTS, Offset.MINIMA), "and what codes are counted from"
