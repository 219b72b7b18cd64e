"""Paged attention, as a model's attention modules call it: write the new keys and values, then attend to all.

    context = AttentionContext(cache, backend)             once per rank
    module.paged_attention = PagedAttention(context, i)    once per attention module
    context.begin(batch); model(...)                       each step

What depends on the step alone is computed in `begin` or by the first layer of a kind, and shared by all layers. A
rank's state lives in its context: several ranks may run as threads of one process.
"""

from typing import Protocol

import torch
from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.executors.kv_cache import KVCache, LayerCache
from holdfast.worker.progress import ProgressCounter


class AttentionBackend(Protocol):
    """Kernels over the pools. A query's bits may depend on its sequence and position, on nothing else."""

    def begin(self, batch: StepBatch) -> None:
        """The layers that follow run on this step, whose block copies are made."""
        ...

    def write(self, layer: LayerCache, key: Tensor, value: Tensor) -> None:
        """key [num_kv_heads, T, key_dim] and value [num_kv_heads, T, value_dim] go where the step has its tokens."""
        ...

    def attend(self, layer: LayerCache, query: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        """query [T, num_heads, key_dim], sinks [num_heads] -> [T, num_heads, value_dim]. The keys are written."""
        ...


class AttentionContext:
    """What the attention layers of one rank share: the cache, the kernels, and the step now running."""

    def __init__(self, cache: KVCache, backend: AttentionBackend, progress: ProgressCounter | None = None) -> None:
        """`progress` moves with every layer."""
        self.cache = cache
        self.progress = progress or ProgressCounter()
        self.backend = backend

    def begin(self, batch: StepBatch) -> None:
        """Prepares a step: makes its block copies, and tells the backend."""
        self.copy_blocks(batch)
        self.backend.begin(batch)

    def copy_blocks(self, batch: StepBatch) -> None:
        """What a step asks to be copied before it."""
        if batch.block_copies.size:
            self.cache.copy(*torch.from_numpy(batch.block_copies).to(self.cache.layers[0].keys.device))


class PagedAttention:
    """One layer's attention. Hugging Face's attention modules call it through one registered function."""

    def __init__(self, context: AttentionContext, layer: int) -> None:
        """`layer` counts the attention layers, as in the cache."""
        self._context = context
        self._layer = context.cache.layers[layer]

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
        backend = self._context.backend
        backend.write(self._layer, key[0], value[0])
        return backend.attend(self._layer, query[0].transpose(0, 1), scaling, s_aux).unsqueeze(0)
