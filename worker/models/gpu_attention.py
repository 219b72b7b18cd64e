"""Attention of the HF backend on a GPU: kernels over a cache, as the model's layers call them."""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.executors.kv_cache import KVCache, LayerCache
from holdfast.worker.models.hf_steps import PagedAttention
from holdfast.worker.models.model import RankModel
from holdfast.worker.progress import ProgressCounter


class GpuAttention(Protocol):
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


def attach(model: RankModel, cache: KVCache, kernels: GpuAttention, progress: ProgressCounter) -> None:
    """Gives every attention layer of a model its share of a cache and the kernels."""

    def layer_attention(index: int) -> PagedAttention:
        layer = cache.layers[index]
        return PagedAttention(layer.spec, partial(_attend, kernels, layer), progress)

    model.attach(layer_attention)


def copy_blocks(cache: KVCache, batch: StepBatch) -> None:
    """What a step asks to be copied before it."""
    if batch.block_copies.size:
        cache.copy(*torch.from_numpy(batch.block_copies).to(cache.layers[0].keys.device))


def _attend(
    kernels: GpuAttention,
    layer: LayerCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    kernels.write(layer, key, value)
    return kernels.attend(layer, query.transpose(0, 1), scaling, sinks)
