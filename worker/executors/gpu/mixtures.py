"""Mixtures of experts on a device: the order in which their kernels run on a step, and the buffers between them.

Rows are grouped by expert on the device: there is room for any choice, and tiles that are not needed end at once.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
from torch import Tensor

from holdfast.worker.executors.gpu.graphs import Buffers
from holdfast.worker.executors.gpu.kernels.experts import (
    PLACES,
    add_experts,
    choose_experts,
    group_rows,
    grouped_linear,
)
from holdfast.worker.executors.gpu.launches import Launch, Launches
from holdfast.worker.executors.gpu.linear_tiles import LinearTile, linear_tile, linear_tiles
from holdfast.worker.executors.gpu.weights import MAX_EXPERTS, DeviceMixture
from holdfast.worker.executors.layout import Mlp

_SCORINGS: Final = ("softmax", "softmax_of_top", "sigmoid")
_FEWEST_BINS: Final = 16  # bins of the histogram over experts
_CHOICES: Final = 1024
"""Choices that a program of `group_rows` takes at a time."""
_TILE_COLUMNS: Final = 256
"""Columns that a program of `add_experts` takes."""
_LARGEST_UNIT: Final = 16
"""A slice is a multiple of this many inputs: with it, the compiler uses loads of 16 bytes."""


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows of a step in tiles of one expert each. A row is there once for each expert that it has chosen."""

    tile: LinearTile
    experts: Tensor
    """[tiles], int32: each tile's expert; -1 for a tile that is not needed"""
    rows: Tensor
    """[tiles, rows of a tile], int32: row * top_k + number of the choice; -1 where a tile is not full"""


def grouped_tile(num_chosen: int, num_experts: int, dtype: torch.dtype) -> LinearTile:
    """Tile of a linear for the number of rows per expert if all experts have the same number."""
    return linear_tile(-(-num_chosen // num_experts), dtype)


def most_tiles(num_chosen: int, num_experts: int, rows: int) -> int:
    """Number of tiles that suffices for any choice of experts by `num_chosen` rows."""
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
            "BLOCK": _TILE_COLUMNS,
            "SLICES": num_slices,
            "TOP_K": top_k,
            "HAS_BIAS": bias is not None,
            "HAS_SHARED": shared is not None,
            "HAS_GATE": gates is not None,
        }
        self._launch(add_experts, (num_rows, -(-columns // _TILE_COLUMNS)), arguments, num_warps=4, num_stages=1)


assert PLACES.value == MAX_EXPERTS, "the expert's number is a part of the compared key"


MAX_SUM_BYTES: Final = 256 << 20
"""Most bytes of the chosen experts' outputs, slice by slice. Larger outputs, of a long prompt, are computed column
block by column block."""
_COLUMNS: Final = 128
"""Columns at a time are a multiple of this."""


class DeviceMixtures:
    """One rank's mixtures of experts, which use the same buffers one after the other."""

    def __init__(
        self, buffers: Buffers, launches: Launches, own: MixtureLaunches, most_sum_bytes: int = MAX_SUM_BYTES
    ) -> None:
        self._buffers = buffers
        self._launches = launches
        self._own = own
        self._most_sum_bytes = most_sum_bytes

    def warm_up(self, mixture: DeviceMixture, x: Tensor) -> None:
        """Compiles the kernels for all tiles: which one a step uses depends on its number of rows, and few numbers are
        tried at load. x [1, hidden] is read by no expert.
        """
        slots = torch.full((1,), -1, dtype=torch.int32, device=x.device)
        for tile in linear_tiles(x.dtype):
            self.run(mixture, x, slots, tile)

    def run(self, mixture: DeviceMixture, x: Tensor, slots: Tensor, tile: LinearTile | None = None) -> Tensor:
        """x [T, hidden], slots [T] -> this rank's part of the mixture's output [T, hidden], float32: its slices added,
        as a subtree of all ranks' slices. Without `tile`, the tile for the number of rows.
        """
        take, rows = self._buffers.take, len(x)
        logits = take("router logits", (1, rows, mixture.router.out_features))
        self._launches.linear(x, mixture.router, logits)
        chosen = take("chosen experts", (rows, mixture.top_k), torch.int32)
        weights = take("weights of experts", (rows, mixture.top_k))
        self._own.choose(mixture, logits[0], slots, chosen, weights)
        groups = self._groups(mixture, chosen, tile or grouped_tile(chosen.numel(), mixture.num_experts, x.dtype))
        shared = None if mixture.shared is None else self._shared(mixture.shared, x)
        gates = logits[0, :, mixture.num_experts :] if mixture.has_gate_of_shared else None
        inner = self._inner(mixture, x, groups, chosen.numel())
        out = take("own part", tuple(x.shape))
        for columns in self._pieces(mixture, chosen.numel(), x.shape[1]):
            width = columns.stop - columns.start
            sums = take("sums of experts", (mixture.num_slices, chosen.numel(), width))
            self._own.grouped(inner, mixture.down[:, columns], groups, sums, sharers=1)
            bias = None if mixture.down_bias is None else mixture.down_bias[:, columns]
            of_shared = None if shared is None else shared[:, :, columns]
            self._own.add(sums, chosen, weights, out[:, columns], bias=bias, shared=of_shared, gates=gates)
        return out

    def _groups(self, mixture: DeviceMixture, chosen: Tensor, tile: LinearTile) -> RowGroups:
        count, take = mixture.num_experts, self._buffers.take
        num_tiles = most_tiles(chosen.numel(), count, tile.tokens)
        experts = take("tiles of experts", (num_tiles,), torch.int32)
        rows = take("rows of experts", (num_tiles, tile.tokens), torch.int32)
        groups = RowGroups(tile, experts, rows)
        self._own.group(chosen, count, groups)
        return groups

    def _inner(self, mixture: DeviceMixture, x: Tensor, groups: RowGroups, num_chosen: int) -> Tensor:
        """Inputs of the experts' second linears [T * top_k, inner]."""
        up = self._buffers.take("up", (1, num_chosen, mixture.up.shape[1]))
        self._own.grouped(x, mixture.up, groups, up, sharers=mixture.top_k, bias=mixture.up_bias)
        inner = self._buffers.take("inner", (num_chosen, mixture.down.shape[2]), x.dtype)
        self._launches.activate(up[0], mixture.activation, mixture.has_gate, inner)
        return inner

    def _shared(self, mlp: Mlp, x: Tensor) -> Tensor:
        """The slices of the expert that all rows go through [slices, T, hidden]."""
        take, rows = self._buffers.take, len(x)
        up = take("up", (1, rows, mlp.up.out_features))
        self._launches.linear(x, mlp.up, up)
        inner = take("inner", (rows, mlp.down.in_features), x.dtype)
        self._launches.activate(up[0], mlp.activation, mlp.has_gate, inner)
        parts = take("parts", (mlp.num_slices, *x.shape))
        self._launches.linear(inner, replace(mlp.down, bias=None), parts)
        return parts

    def _pieces(self, mixture: DeviceMixture, num_chosen: int, hidden: int) -> list[slice]:
        """Columns of the output that are computed together."""
        fits = self._most_sum_bytes // (4 * mixture.num_slices * num_chosen)
        width = max(_COLUMNS, fits // _COLUMNS * _COLUMNS)
        return [slice(first, min(first + width, hidden)) for first in range(0, hidden, width)]
