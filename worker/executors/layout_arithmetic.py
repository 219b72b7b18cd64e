"""Arithmetic of a layout that families state: scales of queries, lengths of states. Importing it needs no torch."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Queries grow with their position, after rotation: by `1 + beta * ln(1 + floor(position / length))`."""

    beta: float
    length: int
    """Positions of a step; below it the factor is one."""

    def factors(self, num_positions: int) -> "Tensor":
        """float32 [num_positions], each computed in double precision and rounded once."""
        import torch

        last = (num_positions - 1) // self.length
        steps = torch.tensor([1.0 + self.beta * math.log1p(step) for step in range(last + 1)], dtype=torch.float64)
        return steps.float().repeat_interleave(self.length)[:num_positions]


def delta_state_length(key_heads: int, value_heads: int, key_dim: int, value_dim: int, num_rows: int) -> int:
    """As `GatedDeltaNet.state_length`, with so many rows of inputs."""
    row = filled(2 * key_heads * key_dim + value_heads * (value_dim + 2), 16)
    return row * num_rows + 16 * key_heads + value_heads * key_dim * filled(value_dim, 32)


def filled(length: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-length // step) * step
