"""Reading of parallelized Hugging Face modules: linears, norms and activations as parts of a decoder layout."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.executors.layout import Activation, Linear, Norm
from holdfast.worker.models.experts import ExpertRouter
from holdfast.worker.models.linear import ColumnParallelLinear, RowActivation, RowParallelLinear
from holdfast.worker.models.linear import Linear as PlainLinear
from holdfast.worker.models.recognized_families import NormKind

_ACTIVATIONS: Final = {
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELU": Activation.GELU,
    "GELUActivation": Activation.GELU,
    "GELUTanh": Activation.GELU_TANH,
    "NewGELUActivation": Activation.GELU_TANH,
    "ReLU": Activation.RELU,
    "ReLUSquaredActivation": Activation.RELU_SQUARED,
}
"""By the classes' names in torch and transformers."""

_EPS_NAMES: Final = ("variance_epsilon", "eps")
_EPS_WITHOUT_WEIGHTS: Final = 1e-5
"""Written into the code of the one norm that has no weights (OLMo)."""

_ROUTER_LINEARS: Final = ("wg", "proj")
"""Names of the linear inside a router that is none itself."""

OFFSETS: Final = {NormKind.RMS_PLUS_ONE: 1.0, NormKind.LAYER_PLUS_ONE: 1.0}


class NotReadable(Exception):
    """A module is not of a kind that a layout can say. The message is the reason."""


def child(module: Any, name: str) -> Any:
    """A module by its name inside another."""
    found = getattr(module, name, None)
    if found is None:
        raise NotReadable(f"{type(module).__name__} has no {name}")
    return found


def columns(modules: Sequence[Any], size: int) -> Linear:
    """Linears whose outputs are shared by `size` ranks, stacked."""
    return stacked([column_parallel(module, size) for module in modules])


def column_parallel(module: Any, size: int) -> PlainLinear:
    """The local part of a linear whose outputs are shared by `size` ranks."""
    if size == 1 and isinstance(module, PlainLinear):
        return module
    if isinstance(module, ColumnParallelLinear) and not module.gathers:
        return module.linear
    raise NotReadable(f"{_kind(module)} is not split along its outputs")


def rows(module: Any, size: int) -> Linear:
    """A linear whose inputs are shared by `size` ranks."""
    if size == 1 and isinstance(module, PlainLinear):
        return stacked([module])
    if isinstance(module, RowParallelLinear) and not module.splits:
        return Linear(weights=(weight_of(module.linear),), bias=_float(module.bias))
    raise NotReadable(f"{_kind(module)} is not split along its inputs")


def stacked(linears: Sequence[PlainLinear]) -> Linear:
    return Linear(weights=tuple(weight_of(linear) for linear in linears), bias=_stacked_bias(linears))


def head_by_head(linear: PlainLinear, head_dim: int) -> Linear:
    """A linear whose outputs are query, key and value of one head after the other: views of it in a layout's order."""

    def ordered(tensor: Tensor) -> list[Tensor]:
        pieces = torch.split(tensor, head_dim)
        return [*pieces[0::3], *pieces[1::3], *pieces[2::3]]

    bias = None if linear.bias is None else torch.cat(ordered(linear.bias)).float()
    return Linear(weights=tuple(ordered(weight_of(linear))), bias=bias)


def interleaved(linear: PlainLinear) -> Linear:
    """A linear whose outputs are gate, up, gate, up, ...: views of it, gate first."""
    weight = weight_of(linear)
    bias = None if linear.bias is None else torch.cat([linear.bias[0::2], linear.bias[1::2]]).float()
    return Linear(weights=(weight[0::2], weight[1::2]), bias=bias)


def router(module: Any) -> tuple[Linear, int]:
    """An expert router, whole on every rank, and how many experts it chooses."""
    inner: Any = module.router if isinstance(module, ExpertRouter) else module
    linear = next((getattr(inner, name) for name in _ROUTER_LINEARS if hasattr(inner, name)), inner)
    weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
    top_k = getattr(inner, "top_k", None) or getattr(getattr(inner, "config", None), "top_k_experts", None)
    if not isinstance(weight, Tensor) or top_k is None:
        raise NotReadable(f"its router is a {_kind(inner)}")
    return Linear(weights=(weight.detach(),), bias=_float(bias)), int(top_k)


def inner_tensor(module: Any, path: str) -> Tensor:
    """A vector by its place inside a module, in float32; routers may be wrapped."""
    for name in path.split("."):
        module = child(module.router if isinstance(module, ExpertRouter) else module, name)
    if not isinstance(module, Tensor):
        raise NotReadable(f"its {path} is a {_kind(module)}")
    return module.detach().float().flatten()


def norm(module: Any, kind: NormKind, size: int) -> Norm:
    """A norm over the last dimension of `size`, of a family's kind."""
    if kind is NormKind.LAYER_WITHOUT_WEIGHTS:
        if list(module.parameters()):
            raise NotReadable(f"{_kind(module)} has weights")
        return Norm(kind="layer", weight=torch.ones(size), eps=_EPS_WITHOUT_WEIGHTS)
    if isinstance(heads := getattr(module, "norms", None), torch.nn.ModuleList):
        return _per_head([norm(head, kind, size) for head in heads])
    eps = next((getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)), None)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    is_layer = kind in (NormKind.LAYER, NormKind.LAYER_PLUS_ONE)
    if eps is None or not isinstance(weight, Tensor) or (bias is not None and not is_layer):
        raise NotReadable(f"{_kind(module)} is not a norm of the expected kind")
    weight = weight.detach().float() + OFFSETS.get(kind, 0.0)
    return Norm(kind="layer" if is_layer else "rms", weight=weight, bias=_float(bias), eps=float(eps))


def activation(module: Any) -> Activation:
    """One of transformers' activations."""
    inner = module.activation if isinstance(module, RowActivation) else module
    known = _ACTIVATIONS.get(_kind(inner))
    if known is None or list(inner.parameters()):
        raise NotReadable(f"its activation is {_kind(inner)}")
    return known


def weight_of(linear: PlainLinear) -> Tensor:
    if not isinstance(linear.weight, Tensor):
        raise NotReadable("a linear was packed before it was read")
    return linear.weight


def _per_head(norms: Sequence[Norm]) -> Norm:
    if any(norm.bias is not None for norm in norms):
        raise NotReadable("the norm of each head has a bias")
    return Norm(kind=norms[0].kind, weight=torch.stack([norm.weight for norm in norms]), eps=norms[0].eps)


def _stacked_bias(linears: Sequence[PlainLinear]) -> Tensor | None:
    """In float32; zeros for linears without one, if others have one."""
    if all(linear.bias is None for linear in linears):
        return None
    biases = [torch.zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
    return torch.cat([bias.float() for bias in biases])


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float()


def _kind(module: object) -> str:
    return type(module).__name__
