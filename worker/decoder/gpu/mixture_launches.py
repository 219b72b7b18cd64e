"""Launches of a mixture's kernels: torch tensors in, the grid and the tile for a step's number of rows.

What may live here: which tile is used when; every choice gives the same bits. What may not: arithmetic (`kernels/`),
and the order of launches (`mixtures.py`).
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from holdfast.worker.decoder.gpu.kernels.experts import PLACES, add_experts, choose_experts, group_rows
from holdfast.worker.decoder.gpu.kernels.grouped import grouped_linear
from holdfast.worker.decoder.gpu.launches import Launch, LinearTile, linear_tile
from holdfast.worker.decoder.gpu.mixture_weights import MOST_EXPERTS, DeviceMixture

_SCORINGS: Final = ("softmax", "softmax_of_top", "sigmoid")
_FEWEST_BINS: Final = 16
_CHOICES: Final = 1024
"""That a program of `group_rows` takes at a time."""
_COLUMNS: Final = 256
"""That a program of `add_experts` takes."""
_LARGEST_UNIT: Final = 16
"""Inputs that a slice is a multiple of: the compiler uses no more, for loads of 16 bytes."""


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows of a step in tiles of one expert each. A row is there once for each expert that it has chosen."""

    tile: LinearTile
    experts: Tensor
    """[tiles], int32: each tile's expert; -1 for a tile that is not needed"""
    rows: Tensor
    """[tiles, rows of a tile], int32: row * top_k + number of the choice; -1 where a tile is not full"""


def grouped_tile(num_chosen: int, num_experts: int, dtype: torch.dtype) -> LinearTile:
    """That of a linear over as many rows as an expert has if all have the same number."""
    return linear_tile(-(-num_chosen // num_experts), dtype)


def most_tiles(num_chosen: int, num_experts: int, rows: int) -> int:
    """Tiles of so many rows that are enough however `num_chosen` rows choose among the experts."""
    begun = min(num_experts, num_chosen)
    return begun + (num_chosen - begun) // rows


class MixtureLaunches:
    """The kernels as functions of tensors. All rows of a tensor are used; buffers are cut before."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def choose(self, mixture: DeviceMixture, logits: Tensor, slots: Tensor, chosen: Tensor, weights: Tensor) -> None:
        """logits [T, experts or one more] -> chosen [T, top_k], int32, ascending, and weights [T, top_k]. Rows whose
        slot is below 0 choose nothing.
        """
        arguments = {
            "logits": logits,
            "slots": slots,
            "chosen": chosen,
            "weights": weights,
            "stride": logits.stride(0),
            "EXPERTS": mixture.num_experts,
            "BLOCK": triton.next_power_of_2(mixture.num_experts),
            "TOP_K": mixture.top_k,
            "SCORING": _SCORINGS.index(mixture.scoring),
            "NORMALIZED": mixture.normalized,
        }
        self._launch(choose_experts, (len(logits),), arguments, num_warps=1, num_stages=1)

    def group(self, chosen: Tensor, num_experts: int, groups: RowGroups) -> None:
        """chosen [T, top_k], int32 -> the contents of `groups`."""
        arguments = {
            "chosen": chosen,
            "tile_experts": groups.experts,
            "tile_rows": groups.rows,
            "num_chosen": chosen.numel(),
            "num_tiles": len(groups.experts),
            "EXPERTS": num_experts,
            "BINS": max(_FEWEST_BINS, triton.next_power_of_2(num_experts)),
            "ROWS": groups.tile.tokens,
            "BLOCK": _CHOICES,
        }
        self._launch(group_rows, (num_experts,), arguments, num_warps=4, num_stages=1)

    def grouped(
        self, x: Tensor, weight: Tensor, groups: RowGroups, out: Tensor, *, sharers: int, bias: Tensor | None = None
    ) -> None:
        """x [T * top_k / sharers, in], weight [experts, out, in] -> out [slices, T * top_k, out], float32, of the
        places that `groups` names. The weight may be some outputs of a larger one. The bias only with one slice.
        """
        num_slices, num_chosen, num_outputs = out.shape
        num_inputs, tile = weight.shape[2], groups.tile
        slice_inputs = num_inputs // num_slices
        unit = min(_LARGEST_UNIT, slice_inputs & -slice_inputs)
        arguments = {
            "x": x,
            "weight": weight,
            "bias": out if bias is None else bias,
            "out": out,
            "tile_experts": groups.experts,
            "tile_rows": groups.rows,
            "num_chosen": num_chosen,
            "num_inputs": num_inputs,
            "num_outputs": num_outputs,
            "expert_stride": weight.stride(0),
            "slice_units": slice_inputs // unit,
            "OUTPUTS": tile.outputs,
            "ROWS": tile.tokens,
            "INPUTS": tile.inputs,
            "SHARERS": sharers,
            "UNIT": unit,
            "EVEN": slice_inputs % tile.inputs == 0,
            "HAS_BIAS": bias is not None,
        }
        grid = (len(groups.experts), -(-num_outputs // tile.outputs), num_slices)
        self._launch(grouped_linear, grid, arguments, num_warps=tile.num_warps, num_stages=tile.num_stages)

    def add(
        self,
        sums: Tensor,
        chosen: Tensor,
        weights: Tensor,
        out: Tensor,
        *,
        bias: Tensor | None,
        shared: Tensor | None,
        gates: Tensor | None,
    ) -> None:
        """sums [slices, T * top_k, n], bias [experts, n], shared [slices, T, n], gates [T, 1] -> out [T, n].

        Of all but the sums, the n columns may be some of wider rows. All float32.
        """
        num_slices, _, columns = sums.shape
        num_rows, top_k = chosen.shape
        arguments = {
            "sums": sums,
            "chosen": chosen,
            "weights": weights,
            "bias": sums if bias is None else bias,
            "shared": sums if shared is None else shared,
            "gates": sums if gates is None else gates,
            "out": out,
            "num_rows": num_rows,
            "columns": columns,
            "hidden": out.stride(0),
            "gate_stride": 0 if gates is None else gates.stride(0),
            "BLOCK": _COLUMNS,
            "SLICES": num_slices,
            "TOP_K": top_k,
            "HAS_BIAS": bias is not None,
            "HAS_SHARED": shared is not None,
            "HAS_GATE": gates is not None,
        }
        self._launch(add_experts, (num_rows, -(-columns // _COLUMNS)), arguments, num_warps=4, num_stages=1)


assert PLACES.value == MOST_EXPERTS, "an expert's number is a part of what the choice compares"
