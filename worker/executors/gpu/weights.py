"""Weights of a decoder layout on a device: each linear one matrix in one piece, tables of rotary angles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from holdfast.worker.executors.finite import check_finite
from holdfast.worker.executors.gpu.linear_tiles import coded_on
from holdfast.worker.executors.layout import (
    Activation,
    Attention,
    DecoderLayout,
    Experts,
    LatentAttention,
    Layer,
    Mlp,
    Rotary,
    attention_of,
    has_state,
    kv_source,
)
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.stored_matrix import StoredMatrix

MAX_EXPERTS: Final = 1024  # experts of one layer


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMixture:
    """One rank's share of a mixture. Its experts have equal shapes."""

    router: Linear
    """Outputs: the experts; then, where `has_gate_of_shared`, the logit of the shared expert's weight."""
    num_experts: int
    top_k: int
    scoring: Literal["softmax", "softmax_of_top", "sigmoid"]
    normalized: bool
    activation: Activation
    has_gate: bool
    up: Tensor
    """[experts, inner or twice that, hidden], dtype of the model"""
    up_bias: Tensor | None
    """[experts, inner or twice that], float32"""
    down: Tensor
    """[experts, hidden, inner]"""
    down_bias: Tensor | None
    """[experts, hidden], float32; zeros on all ranks but the first."""
    num_slices: int
    shared: Mlp | None
    has_gate_of_shared: bool


def mixture_on(device: torch.device, experts: Experts, shared: Mlp | None) -> DeviceMixture:
    """Copies the weights of a mixture, one expert after the other. `shared`: of the same mixture, on the device."""
    first = experts.experts[0]
    ups, downs = [expert.up for expert in experts.experts], [expert.down for expert in experts.experts]
    return DeviceMixture(
        router=_router(device, experts),
        num_experts=len(experts.experts),
        top_k=experts.top_k,
        scoring=experts.scoring,
        normalized=experts.normalized,
        activation=first.activation,
        has_gate=first.has_gate,
        up=_weights(device, ups),
        up_bias=_biases(device, ups),
        down=_weights(device, downs),
        down_bias=_biases(device, downs),
        num_slices=_slices(first.num_slices),
        shared=shared,
        has_gate_of_shared=experts.shared_gate is not None,
    )


def views_of(mixture: DeviceMixture, experts: Experts) -> Experts:
    """The part of a layout that `mixture` is a copy of, by the tensors of the copy."""
    weight, count = mixture.router.weights[0], mixture.num_experts
    bias = None if mixture.router.bias is None else mixture.router.bias[:count]
    return replace(
        experts,
        router=Linear(weights=(weight[:count],), bias=bias),
        experts=tuple(
            replace(
                expert,
                up=_one(mixture.up, mixture.up_bias, number),
                down=_one(mixture.down, mixture.down_bias, number),
            )
            for number, expert in enumerate(experts.experts)
        ),
        shared=mixture.shared,
        shared_gate=Linear(weights=(weight[count:],)) if mixture.has_gate_of_shared else None,
    )


def unfit_mixture(experts: Experts) -> str | None:
    """Part of a mixture that the kernels do not take; None: they take all."""
    shared, first = experts.shared, experts.experts[0]
    if len(experts.experts) > MAX_EXPERTS:
        return f"it has {len(experts.experts)} experts; the maximum is {MAX_EXPERTS}"
    if experts.latent is not None:
        return "its experts have inputs of another size, which the kernels do not make"
    if shared is not None and (shared.num_slices != first.num_slices or shared.down.bias is not None):
        return "the expert that all tokens share is cut into other slices than the others"
    if (
        experts.selection_bias is not None
        or experts.scales is not None
        or experts.router.weights[0].dtype != _dtype(first)
    ):
        return "its router has a selection bias, scales or another dtype, which the kernels do not support"
    return None


def _dtype(mlp: Mlp) -> torch.dtype:
    return mlp.up.weights[0].dtype


def _router(device: torch.device, experts: Experts) -> Linear:
    gate, bias = experts.shared_gate, experts.router.bias
    parts = [*experts.router.weights] if gate is None else [*experts.router.weights, *gate.weights]
    weight = torch.cat([part.to(device) for part in parts])
    if bias is not None:
        bias = torch.cat([bias, bias.new_zeros(len(weight) - len(bias))]).to(device, torch.float32)
    return Linear(weights=(weight,), bias=bias)


def _weights(device: torch.device, linears: Sequence[Linear]) -> Tensor:
    """[linears, outputs, inputs]"""
    first = linears[0]
    shape = (len(linears), first.out_features, first.in_features)
    whole = torch.empty(shape, dtype=first.weights[0].dtype, device=device)
    for linear, place in zip(linears, whole, strict=True):
        parts = torch.split(place, [len(part) for part in linear.weights])
        for part, its_place in zip(linear.weights, parts, strict=True):
            its_place.copy_(part)
    check_finite(whole)
    return whole


def _biases(device: torch.device, linears: Sequence[Linear]) -> Tensor | None:
    """[linears, outputs], float32; zeros for those without, if others have one."""
    if all(linear.bias is None for linear in linears):
        return None
    nothing = torch.zeros(linears[0].out_features)
    biases = [nothing if linear.bias is None else linear.bias.detach().float() for linear in linears]
    return torch.stack([bias.to(device) for bias in biases])


def _one(weights: Tensor, biases: Tensor | None, number: int) -> Linear:
    return Linear(weights=(weights[number],), bias=None if biases is None else biases[number])


class DeviceWeights:
    """A layout whose tensors lie on a device, and its rotary tables."""

    def __init__(self, layout: DecoderLayout, device: torch.device, max_positions: int) -> None:
        """Copies all weights, one after the other. Parts of a linear are stacked, and the experts of a mixture; a head
        that is the embedding's own table is there once. Raises `NotFiniteError` for a weight with a NaN or an infinity.
        """
        self._device = device
        embedding = layout.embedding.to(device).contiguous()
        check_finite(embedding)
        is_tied = len(layout.head.weights) == 1 and layout.head.weights[0] is layout.embedding
        head = self._linear(layout.head, embedding if is_tied else None)
        self.mixtures = tuple(self._mixture(layer.mlp) for layer in layout.layers)
        """Mixtures by layer; None for a layer with an MLP."""
        self.layout = replace(
            layout,
            embedding=embedding,
            head=head,
            norm=self._copied(layout.norm),
            layers=tuple(map(self._layer, layout.layers, self.mixtures)),
        )
        self.angles = tuple(angle_table(rotary, max_positions).to(device) for rotary in layout.rotaries)

    def _layer(self, layer: Layer, mixture: DeviceMixture | None) -> Layer:
        attention, mlp = attention_of(layer), layer.mlp
        assert mlp is not None, "each layer has an MLP"
        return replace(
            layer,
            attention_norm=self._norm(layer.attention_norm),
            attention_out_norm=self._norm(layer.attention_out_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            mlp_out_norm=self._norm(layer.mlp_out_norm),
            attention=replace(
                attention,
                qkv=self._linear(attention.qkv),
                output=self._linear(attention.output, num_slices=_slices(attention.num_slices)),
                query_norm=self._norm(attention.query_norm),
                key_norm=self._norm(attention.key_norm),
                sinks=None if attention.sinks is None else self._floats(attention.sinks),
                num_slices=_slices(attention.num_slices),
            ),
            mlp=self._mlp(mlp) if isinstance(mlp, Mlp) else _views(mlp, mixture),
        )

    def _mixture(self, mlp: Mlp | Experts | None) -> DeviceMixture | None:
        if not isinstance(mlp, Experts):
            return None
        return mixture_on(self._device, mlp, None if mlp.shared is None else self._mlp(mlp.shared))

    def _mlp(self, mlp: Mlp) -> Mlp:
        num_slices = _slices(mlp.num_slices)
        down = self._linear(mlp.down, num_slices=num_slices)
        return replace(mlp, up=self._linear(mlp.up), down=down, num_slices=num_slices)

    def _linear(self, linear: Linear, weight: Tensor | None = None, num_slices: int = 1) -> Linear:
        bias = None if linear.bias is None else self._floats(linear.bias)
        if linear.codes:
            stored = [part for part in linear.codes if isinstance(part, StoredMatrix)]
            return Linear(codes=(coded_on(self._device, stored, num_slices),), bias=bias)
        if weight is None:
            parts = [part.to(self._device) for part in linear.weights]
            weight = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
            check_finite(weight)
        return Linear(weights=(weight,), bias=bias)

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


def _slices(number: int) -> int:
    """Slices of a sum: kernels add powers of two of them. A model with an odd number of heads is on one rank, in one
    slice.
    """
    return number if number in (1, 2, 4, 8) else 1


def _sees_behind(attention: Attention | LatentAttention | None) -> bool:
    return isinstance(attention, Attention) and attention.sees_behind


def unfit(layout: DecoderLayout, tensor_parallel_size: int, block_size: int) -> str | None:
    """Part of a layout that this executor does not run; None: it runs all."""
    if tensor_parallel_size not in (1, 2, 4, 8):
        return f"sums over {tensor_parallel_size} ranks are not a binary tree"
    if 64 % block_size and block_size % 64:
        return f"blocks of {block_size} tokens neither divide 64 nor are a multiple of it"
    if has_state(layout):
        return "layers that keep a state run on CPUs alone"
    if layout.inputs is not None or any(kv_source(layer) is not None for layer in layout.layers):
        return "its layers have per-layer inputs, or share keys and values, which the kernels do not support"
    if layout.places is not None or any(_sees_behind(layer.attention) for layer in layout.layers):
        return "encoders run on CPUs alone"
    groups = set()
    for layer in layout.layers:
        if layer.attention is None or layer.mlp is None:
            return "layers lack attention or an MLP"
        attention, mlp = layer.attention, layer.mlp
        if isinstance(attention, LatentAttention):
            return "latent attention in its absorbed form runs on CPUs alone"
        groups.add(attention.num_heads // attention.num_kv_heads)
        if isinstance(mlp, Experts) and (reason := unfit_mixture(mlp)):
            return reason
        if attention.norms_after_rotation or attention.query_scale is not None:
            return "queries are normed after rotation, or grow with their position, which the GPU kernels lack"
        if layer.beside is not None or layer.output_scale != 1.0 or attention.value_norm is not None:
            return "it has a mixture beside an MLP, scaled layers or norms of values, which the GPU kernels lack"
        scales = (mlp.gate_scale, mlp.inner_scale) if isinstance(mlp, Mlp) else (1.0, 1.0)
        if (attention.value_scale, *scales) != (1.0, 1.0, 1.0):
            return "values and MLPs have scales, which the kernels do not apply"
        if attention.has_gate:
            return "outputs of attention have gates, which the kernels do not apply"
        if attention.head_dim > 256:
            return f"heads have {attention.head_dim} dimensions; the maximum is 256"
    if len(groups) > 1 or max(groups) > 64:
        return f"KV heads are shared by {sorted(groups)} query heads: one number, at most 64, is the limit"
    return None
