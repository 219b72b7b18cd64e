"""Linears on a device: which tile a number of rows gets, and a kernel's arguments for a weight and its codes."""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.executors.coded import CodedMatrix, CodeKind
from holdfast.worker.executors.gpu.coded_weights import WIDEST_TILE
from holdfast.worker.executors.gpu.kernels.codes import BY_TABLE, E4M3, EIGHT_BITS, FOUR_BITS, MINIMA, ZERO_POINTS
from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.executors.units import Offset

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
    """A weight's arguments, for tiles of so many inputs."""
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
