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
    """Same as `GatedDeltaNet.state_length`, with so many rows of inputs."""
    return _recurrence_length(key_heads, value_heads // key_heads, key_dim, value_dim + 2, value_dim, num_rows)


def mamba_state_length(groups: int, heads: int, state_dim: int, head_dim: int, num_rows: int) -> int:
    """Same as `Mamba2.state_length`, with so many rows of inputs."""
    unit = mamba_unit(groups, heads)
    return _recurrence_length(heads // unit, unit, state_dim, head_dim + 1, head_dim, num_rows)


def mamba_unit(groups: int, heads: int) -> int:
    """Heads of a group that one thread takes together: each such unit convolves the group's B and C by itself."""
    of_group = heads // groups
    return next(count for count in (4, 3, 2, 1) if of_group % count == 0)


def _recurrence_length(units: int, heads: int, key_dim: int, inputs: int, value_dim: int, num_rows: int) -> int:
    """Numbers of `units` with so many heads each, which have `inputs` beside queries and keys (`recurrence_task.h`)."""
    row = filled(units * (2 * key_dim + heads * inputs), 16)
    return row * num_rows + units * (16 + heads * key_dim * filled(value_dim, 32))


def filled(length: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-length // step) * step
