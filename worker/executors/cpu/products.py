"""Products with packed weights, for modules that are not a decoder's: a row has the same bits in any company. And the
native library's threads for the modules of one rank.
"""

from contextlib import suppress
from ctypes import CDLL, byref
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.worker.errors import ConfigurationError, ReplicaError
from holdfast.worker.executors.cpu.library import check_outcome, load_library
from holdfast.worker.executors.cpu.part_packing import DTYPES, GROUP, TILE
from holdfast.worker.executors.cpu.structures import NativeLinear
from holdfast.worker.executors.cpu.tile_memory import Arena
from holdfast.worker.executors.finite import check_finite


class NativePool:
    """Used by one thread at a time."""

    def __init__(self, num_threads: int, library: CDLL | None = None) -> None:
        """`library`: another one than that of the machine's best class. Raises `Unavailable` where this machine does
        not run the native library.
        """
        self.library = library or load_library()
        self.arena = Arena()
        self.handle: int | None = self.library.native_pool_create(num_threads, -1, None)
        if not self.handle:
            raise ReplicaError(f"{num_threads} threads could not be started")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            with suppress(TypeError):  # at the interpreter's end
                self.library.native_pool_destroy(self.handle)
            self.handle = None


ROWS_AS: Final = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32, torch.float32: torch.float32}
"""Dtype in which the library takes rows, by the dtype of the model."""


class PackedProduct:
    """y = x W^T + b for rows x [..., in_features], in the weight's dtype: sums in float32, rounded once."""

    def __init__(
        self, pool: NativePool, weight: Tensor, bias: Tensor | None, num_slices: int = 1, *, is_part: bool = False
    ) -> None:
        """`weight` [out_features, in_features] is copied, and so is `bias` [out_features]. Inputs are summed in
        `num_slices`, added as a binary tree. Results are float32 where they are a part of a sum over ranks.

        Raises `ConfigurationError` for a dtype that is not in `DTYPES`, `NotFiniteError` for a NaN or an infinity.
        """
        if weight.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ConfigurationError(f"a weight is {weight.dtype}: a CPU multiplies in {names} (set model.dtype)")
        check_finite(weight)
        self._pool = pool
        self._dtype = weight.dtype
        self._out_features, self._in_features = weight.shape
        self._num_slices = num_slices
        self._out_dtype = torch.float32 if is_part else weight.dtype
        slice_inputs = self._in_features // num_slices
        groups, slice_tiles = -(-self._out_features // GROUP), -(-slice_inputs // TILE)
        k_tiles = num_slices * slice_tiles
        self._padding = slice_tiles * TILE - slice_inputs
        self._bias = None if bias is None else F.pad(bias.float(), (0, groups * GROUP - len(bias)))
        tiles = pool.arena.take(groups * GROUP * k_tiles * TILE * weight.itemsize)
        self._pack(weight, groups * GROUP, slice_tiles, tiles)
        self._linear = NativeLinear(
            tiles=tiles,
            bias=None if self._bias is None else self._bias.data_ptr(),
            slices=num_slices,
            slice_tiles=slice_tiles,
            groups=groups,
            outputs=self._out_features,
        )

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self._in_features).to(ROWS_AS[self._dtype])
        if self._padding:
            rows = F.pad(rows.reshape(len(rows), self._num_slices, -1), (0, self._padding)).flatten(1)
        rows = rows.contiguous()
        out = torch.empty(len(rows), self._out_features)
        pool, rows_in = self._pool, (rows.data_ptr(), rows.shape[1], len(rows))
        outcome = pool.library.native_multiply(
            pool.handle, byref(self._linear), DTYPES[self._dtype], *rows_in, out.data_ptr()
        )
        check_outcome(outcome, "a product")
        return out.to(self._out_dtype).view(*x.shape[:-1], self._out_features)

    def _pack(self, weight: Tensor, num_rows: int, slice_tiles: int, tiles: int) -> None:
        weight = weight if weight.stride(-1) == 1 else weight.contiguous()
        rows = np.zeros(num_rows, dtype=np.uint64)
        rows[: len(weight)] = weight.data_ptr() + np.arange(len(weight)) * weight.stride(0) * weight.itemsize
        slice_inputs = self._in_features // self._num_slices
        pool, shape = self._pool, (num_rows, self._num_slices, slice_inputs, slice_tiles)
        outcome = pool.library.native_pack(pool.handle, rows.ctypes.data, *shape, DTYPES[self._dtype], tiles)
        check_outcome(outcome, "the packing of a weight")
