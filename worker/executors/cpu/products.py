"""Products with packed weights, and attention over the KV cache, for modules that are not a decoder's: a row has the
same bits in any company.
"""

from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.worker.errors import ConfigurationError, ReplicaError
from holdfast.worker.executors.cpu.cache import KEPT_AS_INT8, MAX_HEAD_DIM, TiledCache
from holdfast.worker.executors.cpu.library import check_outcome
from holdfast.worker.executors.cpu.linear_structures import NativeLinear
from holdfast.worker.executors.cpu.part_packing import GROUP, TILE
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.cpu.running_step import array_address
from holdfast.worker.executors.cpu.step_structures import NativeAttention, NativeAttentionRows, NativeStep
from holdfast.worker.executors.cpu.tile_memory import NOT_FINITE
from holdfast.worker.executors.cpu.weight_codes import DTYPES
from holdfast.worker.executors.finite import refuse
from holdfast.worker.executors.kv_cache import KVSpec
from holdfast.worker.executors.step_batch import StepBatch

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
        outcome = pool.library.native_pack(pool.handle, rows.ctypes.data, *shape, DTYPES[self._dtype], 0, tiles)
        check_outcome(outcome, "the packing of a weight")
        if outcome & NOT_FINITE:
            refuse(tuple(weight.shape), weight.dtype)


def unfit(specs: Sequence[KVSpec]) -> str | None:
    """Part of a model's attention layers that the library does not run; None: it runs all."""
    widest = max(max(spec.key_dim, spec.value_dim) for spec in specs)
    if widest > MAX_HEAD_DIM:
        return f"heads have {widest} dimensions; the maximum is {MAX_HEAD_DIM}"
    return None


class LayerAttention:
    """The attention layers of one rank, over the pages of one cache. Used by one thread at a time."""

    def __init__(self, pool: NativePool, specs: Sequence[KVSpec], cache: TiledCache, dtype: torch.dtype) -> None:
        """`cache` is one of these specs, which are not `unfit`, and of this dtype."""
        self._pool, self._specs, self._cache, self._dtype = pool, tuple(specs), cache, dtype
        layers = (NativeAttention * len(self._specs))(
            *(
                NativeAttention(
                    pages=address,
                    softcap=spec.softcap or 0.0,
                    num_heads=spec.num_heads,
                    num_kv_heads=spec.num_kv_heads,
                    key_dim=spec.key_dim,
                    value_dim=spec.value_dim,
                    window=spec.sliding_window or 0,
                    kept_as=KEPT_AS_INT8 if cache.in_int8 else 0,
                )
                for spec, address in zip(self._specs, cache.addresses, strict=True)
            )
        )
        self._handle: int | None = pool.library.native_attention_create(
            layers, len(layers), cache.block_size, DTYPES[dtype], pool.handle
        )
        if not self._handle:
            raise ReplicaError("out of memory for the attention of a step")
        pool.begin_use()
        self._num_rows = 0

    def begin(self, batch: StepBatch) -> None:
        """The layers that follow run on this step, inside `TiledCache.step`, each once."""
        self._num_rows = len(batch.token_ids)
        step = NativeStep(
            first_positions=array_address(batch.first_positions),
            num_tokens=array_address(batch.num_tokens),
            num_blocks=array_address(batch.num_blocks),
            blocks=array_address(batch.block_ids),
            num_rows=self._num_rows,
            num_sequences=len(batch.num_tokens),
        )
        check_outcome(self._pool.library.native_attention_begin(self._handle, byref(step)), "a step")

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sinks: Tensor | None
    ) -> Tensor:
        """query [num_heads, T, key_dim], key [num_kv_heads, T, key_dim], value [num_kv_heads, T, value_dim], sinks
        [num_heads] -> [T, num_heads, value_dim]. Keys and values go to the step's slots first.
        """
        spec = self._specs[layer]
        for rows, shape in (
            (query, (spec.num_heads, self._num_rows, spec.key_dim)),
            (key, (spec.num_kv_heads, self._num_rows, spec.key_dim)),
            (value, (spec.num_kv_heads, self._num_rows, spec.value_dim)),
        ):
            assert (rows.shape, rows.dtype) == (shape, self._dtype), "the rows are those of the step"
        query = query.to(ROWS_AS[self._dtype])
        query, key, value = (rows if rows.stride(2) == 1 else rows.contiguous() for rows in (query, key, value))
        sinks = None if sinks is None else sinks.detach().float().contiguous()
        out = torch.empty(self._num_rows, spec.num_heads, spec.value_dim, dtype=query.dtype)
        native = NativeAttentionRows(
            *(query.data_ptr(), key.data_ptr(), value.data_ptr()),
            *(query.stride(1), query.stride(0), key.stride(1), key.stride(0), value.stride(1), value.stride(0)),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            scaling,
        )
        outcome = self._pool.library.native_attention_run(self._handle, layer, byref(native))
        check_outcome(outcome, "the attention of a layer")
        return out.to(self._dtype)

    def close(self) -> None:
        """Frees the library's memory. The cache stays. Raises `ReplicaError` while a step runs, on another thread."""
        if self._handle:
            if self._pool.library.native_attention_destroy(self._handle):
                raise ReplicaError("a step runs: its memory cannot be freed")
            self._handle = None
            self._pool.end_use()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            with suppress(ReplicaError, TypeError):  # TypeError: at the interpreter's end
                self.close()
