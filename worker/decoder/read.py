"""Reading of parallelized Hugging Face modules: linears, norms and activations as parts of a decoder layout.

What may live here: one module read into one part. What may not: which module plays which part (`families.py`,
`recognize.py`).
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.decoder.layout import Activation, Linear, Norm
from holdfast.worker.layers.activation import RowActivation
from holdfast.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from holdfast.worker.layers.linear import Linear as PlainLinear

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


class NotReadable(Exception):
    """A module is not of a kind that a layout can say. The message is the reason."""


def child(module: Any, name: str) -> Any:
    """A module by its name inside another."""
    found = getattr(module, name, None)
    if found is None:
        raise NotReadable(f"{type(module).__name__} has no {name}")
    return found


def optional_child(module: Any, name: str | None) -> Any:
    return None if name is None else getattr(module, name, None)


def columns(modules: Sequence[Any], size: int) -> Linear:
    """Linears whose outputs are shared by `size` ranks, stacked."""
    return stacked([_column_parallel(module, size) for module in modules])


def whole(module: Any) -> Linear:
    """A linear that every rank has all of."""
    if not isinstance(module, PlainLinear):
        raise NotReadable(f"{type(module).__name__} is not a linear that every rank has all of")
    return stacked([module])


def rows(module: Any, size: int) -> Linear:
    """A linear whose inputs are shared by `size` ranks."""
    if size == 1:
        return whole(module)
    if not isinstance(module, RowParallelLinear) or module.splits:
        raise NotReadable(f"{type(module).__name__} is not split along its inputs")
    return Linear(weights=(_weight(module.linear),), bias=_float(module.bias))


def stacked(linears: Sequence[PlainLinear]) -> Linear:
    return Linear(weights=tuple(_weight(linear) for linear in linears), bias=_stacked_bias(linears))


def norm(module: Any, kind: str, offset: float) -> Norm:
    """A norm over the last dimension. `kind` and `offset` are those of the family."""
    eps = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
    weight = getattr(module, "weight", None)
    if eps is None or not isinstance(weight, Tensor):
        raise NotReadable(f"{type(module).__name__} is not a norm with weights and an epsilon")
    bias = _float(getattr(module, "bias", None))
    if kind == "layer":
        return Norm(kind="layer", weight=_offset(weight, offset), bias=bias, eps=float(eps))
    if bias is not None:
        raise NotReadable(f"{type(module).__name__} has a bias")
    return Norm(kind="rms", weight=_offset(weight, offset), eps=float(eps))


def activation(module: Any) -> Activation:
    """One of transformers' activations."""
    inner = module.activation if isinstance(module, RowActivation) else module
    known = _ACTIVATIONS.get(type(inner).__name__)
    if known is None or list(inner.parameters()):
        raise NotReadable(f"its activation is {type(inner).__name__}")
    return known


def _column_parallel(module: Any, size: int) -> PlainLinear:
    if size == 1 and isinstance(module, PlainLinear):
        return module
    if isinstance(module, ColumnParallelLinear) and not module.gathers:
        return module.linear
    raise NotReadable(f"{type(module).__name__} is not split along its outputs")


def _weight(linear: PlainLinear) -> Tensor:
    if linear.weight is None:
        raise NotReadable("a linear was packed before it was read")
    return linear.weight


def _stacked_bias(linears: Sequence[PlainLinear]) -> Tensor | None:
    """In float32; zeros for linears without one, if others have one."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat([_bias_of(linear) for linear in linears])


def _bias_of(linear: PlainLinear) -> Tensor:
    return torch.zeros(linear.out_features) if linear.bias is None else linear.bias.float()


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float()


def _offset(weight: Tensor, offset: float) -> Tensor:
    return weight.detach().float() + offset if offset else weight.detach().float()
