"""Paged attention, as a model's attention modules call it: write the new keys and values, then attend to all.

    context = AttentionContext(cache, tiles)               once per rank
    module.paged_attention = PagedAttention(context, i)    once per attention module
    context.begin(batch); model(...)                       each step

What depends on the step alone is computed in `begin` or by the first layer of a kind, and shared by all layers. A
rank's state lives in its context: several ranks may run as threads of one process. What may not live here: kernels
(`sdpa.py`).
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.attention.kv_cache import KVCache, LayerCache
from holdfast.worker.attention.sdpa import SdpaBackend
from holdfast.worker.distributed.step_batch import IntArray, StepBatch
from holdfast.worker.layers.row_tiles import RowTiles
from holdfast.worker.progress import ProgressCounter


class AttentionBackend(Protocol):
    """Kernels that attend over the pools. A query's bits may depend on its sequence and position, on nothing else."""

    def begin(self, batch: StepBatch) -> None:
        """The layers that follow run on this step."""
        ...

    def attend(self, layer: LayerCache, query: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        """query [T, num_heads, key_dim], sinks [num_heads] -> [T, num_heads, value_dim]. The keys are written."""
        ...


class AttentionContext:
    """What the attention layers of one rank share: the cache, the kernels, and the step now running."""

    def __init__(self, cache: KVCache, tiles: RowTiles, progress: ProgressCounter | None = None) -> None:
        """Tries out the kernels' row rules on this machine, for each kind of layer. `progress` moves with every one."""
        keys = cache.layers[0].keys
        specs = [layer.spec for layer in cache.layers]
        self.cache = cache
        self.progress = progress or ProgressCounter()
        self.backend: AttentionBackend = SdpaBackend(specs, tiles, block_size=cache.block_size, dtype=keys.dtype)
        self.slots = torch.zeros(0, dtype=torch.int64, device=keys.device)
        """[T]: where each token of the step is written, as block * block_size + offset."""

    def begin(self, batch: StepBatch) -> None:
        """Prepares a step: makes its block copies, and clears the blocks that it begins and does not fill.

        So the slots beyond a sequence's tokens hold zeros or its own values: masked keys never bring in another's NaN.
        """
        block_size, device = self.cache.block_size, self.slots.device
        if batch.block_copies.size:
            self.cache.copy(*torch.from_numpy(batch.block_copies).to(device))
        self.slots = torch.from_numpy(slots_of(batch, block_size)).to(device)
        begun = begun_blocks(batch, block_size)
        if len(begun):
            self.cache.clear(torch.from_numpy(begun).to(device))
        self.backend.begin(batch)


class PagedAttention:
    """One layer's attention. Hugging Face's attention modules call it through one registered function."""

    def __init__(self, context: AttentionContext, layer: int) -> None:
        """`layer` counts the attention layers, as in the cache."""
        self._context = context
        self._layer = context.cache.layers[layer]
        self._key_rows = self._layer.keys.flatten(0, 1).flatten(1)
        self._value_rows = self._layer.values.flatten(0, 1).flatten(1)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        """query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, H, Dv].

        T are the step's tokens in its order. Window, softcap and sinks are those of the layer's spec.
        """
        spec = self._layer.spec
        assert (sliding_window, softcap, s_aux is not None) == (spec.sliding_window, spec.softcap, spec.has_sinks)
        self._context.progress.tick()
        slots = self._context.slots
        self._key_rows.index_copy_(0, slots, key.transpose(1, 2).reshape(len(slots), -1))
        self._value_rows.index_copy_(0, slots, value.transpose(1, 2).reshape(len(slots), -1))
        output = self._context.backend.attend(self._layer, query[0].transpose(0, 1), scaling, s_aux)
        return output.unsqueeze(0)


def slots_of(batch: StepBatch, block_size: int) -> IntArray:
    """[T]: where in the pools each token's key and value go."""
    sequence_of_token = np.repeat(np.arange(len(batch.num_tokens)), batch.num_tokens)
    positions = batch.positions
    return batch.blocks_of(sequence_of_token, positions // block_size) * block_size + positions % block_size


def begun_blocks(batch: StepBatch, block_size: int) -> IntArray:
    """Blocks whose first token is of this step and that this step does not fill: at most one per sequence."""
    ends = batch.first_positions + batch.num_tokens
    last_blocks = (ends - 1) // block_size
    is_begun = (last_blocks * block_size >= batch.first_positions) & (ends % block_size != 0)
    return batch.blocks_of(np.flatnonzero(is_begun), last_blocks[is_begun])
