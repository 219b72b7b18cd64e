"""The experts of a mixture on a CPU: one row-invariant linear each, instead of one grouped matmul over all.

Hugging Face's own ways (a loop, a batched or a grouped matmul) call kernels with as many rows as happen to choose an
expert, and so a token's bits depend on its neighbours. On a GPU their grouped matmul stays, for its speed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from worker.linear import Linear
from worker.row_tiles import RowTiles

_TENSORS = {"gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"}


class Experts(nn.Module):
    """Takes over the weights of a Hugging Face experts module, whole or one rank's share; its call is the same."""

    def __init__(self, module: Any, *, tiles: RowTiles) -> None:
        """`module` is one that `can_replace` accepts. Its weights are consumed."""
        super().__init__()
        self._activation = module._apply_gate if module.has_gate else module.act_fn
        first = "gate_up_proj" if module.has_gate else "up_proj"
        self.up = _linears(module, first, tiles)
        self.down = _linears(module, "down_proj", tiles)
        for name in _TENSORS & set(dict(module.named_parameters())):
            module.register_parameter(name, None)

    @staticmethod
    def can_replace(module: nn.Module) -> bool:
        """Whether this is an experts module of the common form: weights `[expert, out, in]`, gate and activation."""
        names = set(dict(module.named_parameters()))
        described = getattr(module, "is_transposed", None) is not None and getattr(module, "has_gate", None) is not None
        return described and "down_proj" in names and names <= _TENSORS

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`hidden_states` [tokens, hidden], expert ids and their weights [tokens, k] -> [tokens, hidden].

        A token's experts are added in the order of their ids, so the sum does not depend on the other tokens.
        """
        output = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, slots = torch.where(top_k_index == expert)
            rows = self.down[expert](self._activation(self.up[expert](hidden_states[tokens])))
            weighted = rows * top_k_weights[tokens, slots, None]
            output.index_add_(0, tokens, weighted.to(output.dtype))
        return output


def _linears(module: Any, name: str, tiles: RowTiles) -> nn.ModuleList:
    weights = getattr(module, name)
    biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
    if module.is_transposed:
        weights = weights.transpose(1, 2)
    return nn.ModuleList(
        Linear(weight.contiguous(), bias, tiles=tiles) for weight, bias in zip(weights, biases, strict=True)
    )
