"""Weights of a mixture of experts on a device: all experts' linears in one tensor each, so that one kernel reads them.

What may live here: copies, and what of a mixture the kernels do not take. What may not: what is computed with them
(`mixtures.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from holdfast.worker.decoder.layout import Activation, Experts, Linear, Mlp

MOST_EXPERTS: Final = 1024


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
        num_slices=first.num_slices,
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
        shared_gate=weight[count:] if mixture.has_gate_of_shared else None,
    )


def unfit_mixture(experts: Experts) -> str | None:
    """What of a mixture the kernels do not take."""
    shared, first = experts.shared, experts.experts[0]
    if len(experts.experts) > MOST_EXPERTS:
        return f"it has {len(experts.experts)} experts, and {MOST_EXPERTS} are the most"
    if shared is not None and (shared.num_slices != first.num_slices or shared.down.bias is not None):
        return "the expert that all tokens share is cut into other slices than the others"
    return None


def _router(device: torch.device, experts: Experts) -> Linear:
    gate, bias = experts.shared_gate, experts.router.bias
    parts = [*experts.router.weights] if gate is None else [*experts.router.weights, gate]
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
