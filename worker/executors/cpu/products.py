"""Products with packed weights, for modules that are not a decoder's: a row has the same bits in any company."""

from contextlib import suppress
from ctypes import byref
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.worker.errors import ConfigurationError, ReplicaError
from holdfast.worker.executors.cpu.library import load_library
from holdfast.worker.executors.cpu.packing import DTYPES, GROUP, TILE
from holdfast.worker.executors.cpu.sampler import OUT_OF_MEMORY
from holdfast.worker.executors.cpu.structures import NativeLinear
from holdfast.worker.executors.cpu.tile_memory import Arena

_OF_ROWS: Final = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32, torch.float32: torch.float32}
"""What the library takes rows as, by the dtype of the weight."""


class Products:
    """The threads that multiply for one rank, and the memory of its packed weights. Used by one thread at a time."""

    def __init__(self, num_threads: int) -> None:
        """Raises `Unavailable` where this machine does not run the native library."""
        self.library = load_library()
        self.arena = Arena()
        self.pool = self.library.native_pool_create(num_threads, -1, None)
        if not self.pool:
            raise ReplicaError(f"{num_threads} threads could not be started")

    def __del__(self) -> None:
        if getattr(self, "pool", None):
            with suppress(TypeError):  # at the interpreter's end
                self.library.native_pool_destroy(self.pool)


class PackedProduct:
    """y = x W^T + b for rows x [..., in_features], in the weight's dtype: sums in float32, rounded once."""

    def __init__(self, products: Products, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out_features, in_features] is copied, and so is `bias` [out_features].

        Raises `ConfigurationError` for a dtype that is not in `DTYPES`.
        """
        if weight.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ConfigurationError(f"a weight is {weight.dtype}: a CPU multiplies in {names} (set model.dtype)")
        self._products = products
        self._dtype = weight.dtype
        self._out_features, self._in_features = weight.shape
        groups, k_tiles = -(-self._out_features // GROUP), -(-self._in_features // TILE)
        self._padding = k_tiles * TILE - self._in_features
        self._bias = None if bias is None else F.pad(bias.float(), (0, groups * GROUP - len(bias)))
        tiles = products.arena.take(groups * GROUP * k_tiles * TILE * weight.itemsize)
        self._pack(weight, groups * GROUP, k_tiles, tiles)
        self._linear = NativeLinear(
            tiles=tiles,
            bias=None if self._bias is None else self._bias.data_ptr(),
            slices=1,
            slice_tiles=k_tiles,
            groups=groups,
            outputs=self._out_features,
        )

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self._in_features).to(_OF_ROWS[self._dtype])
        rows = F.pad(rows, (0, self._padding)) if self._padding else rows.contiguous()
        out = torch.empty(len(rows), self._out_features)
        self._check(
            self._products.library.native_multiply(
                self._products.pool,
                byref(self._linear),
                DTYPES[self._dtype],
                rows.data_ptr(),
                rows.shape[1],
                len(rows),
                out.data_ptr(),
            )
        )
        return out.to(self._dtype).view(*x.shape[:-1], self._out_features)

    def _pack(self, weight: Tensor, num_rows: int, k_tiles: int, tiles: int) -> None:
        weight = weight if weight.stride(-1) == 1 else weight.contiguous()
        rows = np.zeros(num_rows, dtype=np.uint64)
        rows[: len(weight)] = weight.data_ptr() + np.arange(len(weight)) * weight.stride(0) * weight.itemsize
        library, pool = self._products.library, self._products.pool
        self._check(
            library.native_pack(
                pool, rows.ctypes.data, num_rows, 1, self._in_features, k_tiles, DTYPES[self._dtype], tiles
            )
        )

    def _check(self, outcome: int) -> None:
        if outcome == OUT_OF_MEMORY:
            raise ReplicaError("there is no memory for a product")
        if outcome < 0:
            raise ReplicaError(f"the native library's threads did not multiply ({outcome})")
