"""Mixture-of-experts layers, row-invariant: a token's bits do not depend on the other tokens of the step.

Hugging Face's own implementations (a loop, a batched or a grouped matmul) call kernels with a row count that depends on
the choice of experts. Here each expert has row-invariant linears, or a device's kernels take all experts at once. On
CPUs expert routers are called with a fixed number of rows.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.worker.models.linear import VECTOR, Linear

_TENSORS = {"gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"}

ROUTER_ROWS: Final = 32

Chosen = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows [T, hidden], expert ids [T, top_k] and their weights [T, top_k] -> [T, hidden]."""

Grouping = Callable[[Tensor, Tensor | None, Tensor, Tensor | None, Callable[[Tensor], Tensor]], Chosen]
"""Experts [count, out, in] and their biases [count, out] of both linears, and the activation between -> kernels."""


class ExpertRouter(nn.Module):
    """An expert router: calls Hugging Face's with `ROUTER_ROWS` rows at a time, filled up with zeros."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    @staticmethod
    def can_replace(module: nn.Module) -> bool:
        """Whether this is an expert router that multiplies by its own weight, outside Holdfast's linears."""
        weight = getattr(module, "weight", None)
        return type(module).__name__.endswith("Router") and isinstance(weight, Tensor) and weight.dim() == 2

    def forward(self, hidden_states: Tensor, *others: Any) -> tuple[Tensor, ...]:
        """Any [..., hidden] -> the router's results for all tokens, each [tokens, ...]. `others` are passed on."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        tiles = [self._route(tile, *others) for tile in torch.split(rows, ROUTER_ROWS)]
        return tuple(torch.cat(parts) for parts in zip(*tiles, strict=True))

    def _route(self, tile: Tensor, *others: Any) -> list[Tensor]:
        padded = F.pad(tile, (0, 0, 0, ROUTER_ROWS - len(tile)))
        return [result[: len(tile)] for result in self.router(padded, *others)]


class Experts(nn.Module):
    """Takes over the weights of a Hugging Face experts module, whole or one rank's share; its call is the same."""

    def __init__(self, module: Any) -> None:
        """`module`: one that `can_replace` accepts. Its weights are consumed."""
        super().__init__()
        self._activation = module._apply_gate if module.has_gate else module.act_fn
        self.has_gate: bool = module.has_gate
        self.activation: nn.Module | None = getattr(module, "act_fn", None)
        """None if the module computes it in another form."""
        self.is_partial = False
        """The module's results are summed over ranks."""
        first = "gate_up_proj" if module.has_gate else "up_proj"
        self.up = _linears(module, first)
        self.down = _linears(module, "down_proj")
        self._grouped: Chosen | None = None
        for name in _TENSORS & set(dict(module.named_parameters())):
            module.register_parameter(name, None)

    @staticmethod
    def can_replace(module: nn.Module) -> bool:
        """Whether this is an experts module of the common form: weights `[expert, out, in]`, gate and activation."""
        names = set(dict(module.named_parameters()))
        described = getattr(module, "is_transposed", None) is not None and getattr(module, "has_gate", None) is not None
        return described and "down_proj" in names and names <= _TENSORS

    def group(self, grouping: Grouping) -> None:
        """All experts run at once from now on, by kernels that take the weights. Once, before linears are settled."""
        self._grouped = grouping(*_stacked(self.up), *_stacked(self.down), self._activate)
        self.up = self.down = nn.ModuleList()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`hidden_states` [tokens, hidden], expert ids and their weights [tokens, k] -> [tokens, hidden].

        A token's experts are added in the order of their ids, so the sum does not depend on the other tokens.
        """
        if self._grouped is not None:
            return self._grouped(hidden_states, top_k_index, top_k_weights)
        output = torch.zeros_like(hidden_states)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            tokens, slots = torch.where(top_k_index == expert)
            rows = self.down[expert](self._activate(self.up[expert](hidden_states[tokens])))
            weighted = rows * top_k_weights[tokens, slots, None]
            output.index_add_(0, tokens, weighted.to(output.dtype))
        return output

    def _activate(self, rows: Tensor) -> Tensor:
        """The activation, on whole vectors in all (see `linear.py`): a row's result depends on torch's vectorized
        form.
        """
        padding = 0 if rows.shape[-1] % (2 * VECTOR) == 0 else -len(rows) % VECTOR
        activated: Tensor = self._activation(F.pad(rows, (0, 0, 0, padding)) if padding else rows)
        return activated[: len(rows)]


def _linears(module: Any, name: str) -> nn.ModuleList:
    weights = getattr(module, name)
    biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
    if module.is_transposed:
        weights = weights.transpose(1, 2)
    return nn.ModuleList(Linear(weight, bias) for weight, bias in zip(weights, biases, strict=True))


def _stacked(linears: nn.ModuleList) -> tuple[Tensor, Tensor | None]:
    """Weights [experts, out, in] and biases [experts, out] of linears that are not settled."""
    weights, biases = zip(*((linear.weight, linear.bias) for linear in linears), strict=True)
    return torch.stack(weights), None if biases[0] is None else torch.stack(biases)
