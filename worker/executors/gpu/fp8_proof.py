"""Proof at load for keys and values in fp8: the kernels store and read them on this device by the format.

Equality in every bit, with what plain torch makes of the same rows and with attention over numbers of the model's own
dtype: what fp8 costs of a model's accuracy is no part of it.
"""

import torch
from torch import Tensor

from holdfast.worker.executors import kv_cache as fp8
from holdfast.worker.executors.gpu.launches import StepTensors
from holdfast.worker.executors.gpu.layers import DeviceLayers, kv_spec
from holdfast.worker.executors.kv_cache import KVCache, LayerCache
from holdfast.worker.executors.layout import Attention, DecoderLayout, attention_of

_SMALLEST, _LARGEST = -12, 8
"""Powers of two of rows."""


def fp8_difference(
    layout: DecoderLayout, layers: DeviceLayers, step: StepTensors, num_blocks: int, block_size: int
) -> str | None:
    """Difference in a layer of each kind, run on random rows of a step; None: none."""
    kinds: dict[object, int] = {}
    for index, layer in enumerate(layout.layers):
        kinds.setdefault(_kind(attention_of(layer)), index)
    for index in kinds.values():
        spec, device = kv_spec(attention_of(layout.layers[index])), layout.embedding.device
        plain, small = (
            KVCache.allocate([spec], num_blocks, block_size, layout.dtype, device, in_fp8=in_fp8).layers[0]
            for in_fp8 in (False, True)
        )
        qkv = _rows(attention_of(layout.layers[index]), step)
        what = _difference(layers, index, qkv, step, plain, small)
        if what is not None:
            return f"{what} in fp8 of layer {index} are stored or read wrongly on this device"
    return None


def _difference(
    layers: DeviceLayers, index: int, qkv: Tensor, step: StepTensors, plain: LayerCache, small: LayerCache
) -> str | None:
    layers.mix(index, qkv, step, plain)
    mixed = layers.mix(index, qkv, step, small).clone()
    for name, pool, codes, scales in (
        ("keys", plain.keys, small.keys, small.key_scales),
        ("values", plain.values, small.values, small.value_scales),
    ):
        assert scales is not None, "it was allocated so"
        expected, expected_scales = fp8.encoded(pool.cpu())
        stored = scales.cpu().transpose(1, 2)
        if not torch.equal(codes.cpu(), expected) or not torch.equal(stored, expected_scales):
            return name
        pool.copy_(fp8.decoded(expected, expected_scales, pool.dtype))
    return None if torch.equal(layers.mix_again(index, step, plain), mixed) else "scores"


def _rows(attention: Attention, step: StepTensors) -> Tensor:
    """Random queries, keys and values [T, all heads], of many magnitudes."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(_SMALLEST, _LARGEST, (step.num_rows, 1), generator=generator)
    rows = torch.randn(step.num_rows, attention.qkv.out_features, generator=generator) * torch.exp2(powers.float())
    return rows.to(step.positions.device)


def _kind(attention: Attention) -> object:
    """All that the kernels that read and write the cache are made for."""
    both = (attention.query_norm, attention.key_norm)
    norms = [None if norm is None else (norm.kind, norm.weight.dim()) for norm in both]
    shape = (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.rotary is None)
    return shape, *norms, attention.sliding_window, attention.softcap, attention.sinks is None
