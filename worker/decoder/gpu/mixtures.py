"""Mixtures of experts on a device: the order in which their kernels run on a step, and the buffers between them.

Rows are grouped by expert on the device: there is room for any choice, and tiles that are not needed end at once. What
may not live here: arithmetic (`kernels/`), tiles (`mixture_launches.py`).
"""

from typing import Final

import torch
from torch import Tensor

from holdfast.worker.decoder.gpu.buffers import Buffers
from holdfast.worker.decoder.gpu.launches import Launches, LinearTile, linear_tiles
from holdfast.worker.decoder.gpu.mixture_launches import MixtureLaunches, RowGroups, grouped_tile, most_tiles
from holdfast.worker.decoder.gpu.mixture_weights import DeviceMixture
from holdfast.worker.decoder.layout import Linear, Mlp

MOST_SUM_BYTES: Final = 256 << 20
"""Of what the chosen experts give, slice by slice. Where it is more, of a long prompt, columns are taken in turns."""
_COLUMNS: Final = 128
"""Columns at a time are a multiple of this."""


class DeviceMixtures:
    """One rank's mixtures of experts, which use the same buffers one after the other."""

    def __init__(
        self, buffers: Buffers, launches: Launches, own: MixtureLaunches, most_sum_bytes: int = MOST_SUM_BYTES
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
        as a subtree of all ranks' slices. Without `tile`, that which suits the number of rows.
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
        """What goes into the experts' second linears [T * top_k, inner]."""
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
        self._launches.linear(inner, Linear(weights=mlp.down.weights), parts)
        return parts

    def _pieces(self, mixture: DeviceMixture, num_chosen: int, hidden: int) -> list[slice]:
        """Columns of the output that are computed together."""
        fits = self._most_sum_bytes // (4 * mixture.num_slices * num_chosen)
        width = max(_COLUMNS, fits // _COLUMNS * _COLUMNS)
        return [slice(first, min(first + width, hidden)) for first in range(0, hidden, width)]
