"""Weights of a decoder layout on a device: each linear one matrix in one piece, tables of rotary angles.

What may live here: copies. What may not: what a layer computes (`layers.py`).
"""

from dataclasses import replace

import torch
from torch import Tensor

from holdfast.worker.decoder.gpu.mixture_weights import DeviceMixture, mixture_on, unfit_mixture, views_of
from holdfast.worker.decoder.layout import DecoderLayout, Experts, Layer, Linear, Mlp, Norm, Rotary


class DeviceWeights:
    """A layout whose tensors lie on a device, and its rotary tables."""

    def __init__(self, layout: DecoderLayout, device: torch.device, max_positions: int) -> None:
        """Copies all weights, one after the other. Parts of a linear are stacked, and the experts of a mixture; a head
        that is the embedding's own table is there once.
        """
        self._device = device
        embedding = layout.embedding.to(device).contiguous()
        is_tied = len(layout.head.weights) == 1 and layout.head.weights[0] is layout.embedding
        head = self._linear(layout.head, embedding if is_tied else None)
        self.mixtures = tuple(self._mixture(layer.mlp) for layer in layout.layers)
        """By layer; None where a layer has an MLP."""
        self.layout = replace(
            layout,
            embedding=embedding,
            head=head,
            norm=self._copied(layout.norm),
            layers=tuple(map(self._layer, layout.layers, self.mixtures)),
        )
        self.angles = tuple(angle_table(rotary, max_positions).to(device) for rotary in layout.rotaries)

    def _layer(self, layer: Layer, mixture: DeviceMixture | None) -> Layer:
        attention, mlp = layer.attention, layer.mlp
        return replace(
            layer,
            attention_norm=self._norm(layer.attention_norm),
            attention_out_norm=self._norm(layer.attention_out_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            mlp_out_norm=self._norm(layer.mlp_out_norm),
            attention=replace(
                attention,
                qkv=self._linear(attention.qkv),
                output=self._linear(attention.output),
                query_norm=self._norm(attention.query_norm),
                key_norm=self._norm(attention.key_norm),
                sinks=None if attention.sinks is None else self._floats(attention.sinks),
            ),
            mlp=self._mlp(mlp) if isinstance(mlp, Mlp) else _views(mlp, mixture),
        )

    def _mixture(self, mlp: Mlp | Experts) -> DeviceMixture | None:
        if isinstance(mlp, Mlp):
            return None
        return mixture_on(self._device, mlp, None if mlp.shared is None else self._mlp(mlp.shared))

    def _mlp(self, mlp: Mlp) -> Mlp:
        return replace(mlp, up=self._linear(mlp.up), down=self._linear(mlp.down))

    def _linear(self, linear: Linear, weight: Tensor | None = None) -> Linear:
        if weight is None:
            parts = [part.to(self._device) for part in linear.weights]
            weight = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        return Linear(weights=(weight,), bias=None if linear.bias is None else self._floats(linear.bias))

    def _norm(self, norm: Norm | None) -> Norm | None:
        return None if norm is None else self._copied(norm)

    def _copied(self, norm: Norm) -> Norm:
        bias = None if norm.bias is None else self._floats(norm.bias)
        return replace(norm, weight=self._floats(norm.weight), bias=bias)

    def _floats(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device, torch.float32).contiguous()


def _views(experts: Experts, mixture: DeviceMixture | None) -> Experts:
    assert mixture is not None, "a layer has an MLP or a mixture"
    return views_of(mixture, experts)


def angle_table(rotary: Rotary, max_positions: int) -> Tensor:
    """[positions, 2, pairs], float32: cosines and sines of float32 angles, as Hugging Face takes them."""
    angles = (torch.arange(max_positions).float()[:, None] * rotary.inverse_frequencies.cpu().float()).double()
    return torch.stack((angles.cos(), angles.sin()), 1).mul_(rotary.scaling).float()


def unfit(layout: DecoderLayout, tensor_parallel_size: int, block_size: int) -> str | None:
    """What of a layout this executor does not run."""
    if tensor_parallel_size not in (1, 2, 4, 8):
        return f"sums over {tensor_parallel_size} ranks are no binary tree"
    if 64 % block_size and block_size % 64:
        return f"blocks of {block_size} tokens neither divide 64 nor are a multiple of it"
    groups = set()
    for layer in layout.layers:
        attention, mlp = layer.attention, layer.mlp
        groups.add(attention.num_heads // attention.num_kv_heads)
        if isinstance(mlp, Experts) and (reason := unfit_mixture(mlp)):
            return reason
        if attention.head_dim > 256:
            return f"heads have {attention.head_dim} dimensions, and 256 are the most"
        of_mlp = mlp.experts[0] if isinstance(mlp, Experts) else mlp
        slices = (attention.num_slices, of_mlp.num_slices)
        if any(number not in (1, 2, 4, 8) for number in slices):
            return f"sums of {slices} slices are no binary trees"
    if len(groups) > 1 or max(groups) > 64:
        return f"KV heads are shared by {sorted(groups)} query heads: one number, at most 64, is the limit"
    return None
