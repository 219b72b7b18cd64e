"""Attention over the KV cache on CPUs, for modules that are not a decoder's: a row has the same bits in any company."""

from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref

import torch
from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu.cache import MAX_HEAD_DIM, TiledCache
from holdfast.worker.executors.cpu.library import check_outcome
from holdfast.worker.executors.cpu.part_packing import DTYPES
from holdfast.worker.executors.cpu.products import ROWS_AS, NativePool
from holdfast.worker.executors.cpu.running_step import array_address
from holdfast.worker.executors.cpu.structures import (
    KEPT_AS_INT8,
    NativeAttention,
    NativeAttentionRows,
    NativeStep,
)
from holdfast.worker.executors.kv_cache import KVSpec


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
        if self._handle and self._pool.handle:
            if self._pool.library.native_attention_destroy(self._handle):
                raise ReplicaError("a step runs: its memory cannot be freed")
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            with suppress(ReplicaError, TypeError):  # TypeError: at the interpreter's end
                self.close()
