"""Arithmetic of a layout: slices of row-parallel sums, scales of queries, lengths of states. Importing it needs no
torch.

A sum over heads, or over inner features, is taken in slices that are added as a binary tree: neighbours, then
neighbours of those. Ranks that hold whole subtrees add up the rest of the same tree, and so have the bits of one rank.
"""

import math
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Final

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


def delta_state_length(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, num_rows: int, *, by_key: bool = False
) -> int:
    """Same as `GatedDeltaNet.state_length`, with this many rows of inputs; `by_key`: with a decay for each key."""
    inputs = value_dim + 1 + (key_dim if by_key else 1)
    return _recurrence_length(key_heads, value_heads // key_heads, key_dim, inputs, value_dim, num_rows)


def mamba_state_length(groups: int, heads: int, state_dim: int, head_dim: int, num_rows: int) -> int:
    """Same as `Mamba2.state_length`, with this many rows of inputs."""
    unit = mamba_unit(groups, heads)
    return _recurrence_length(heads // unit, unit, state_dim, head_dim + 1, head_dim, num_rows)


def mamba_unit(groups: int, heads: int) -> int:
    """Heads of a group that one thread takes together: each such unit convolves the group's B and C by itself."""
    of_group = heads // groups
    return next(count for count in (4, 3, 2, 1) if of_group % count == 0)


def _recurrence_length(units: int, heads: int, key_dim: int, inputs: int, value_dim: int, num_rows: int) -> int:
    """Numbers of `units` with this many heads each, which have `inputs` beside queries and keys
    (`recurrence_task.h`).
    """
    row = filled(units * (2 * key_dim + heads * inputs), 16)
    return row * num_rows + units * (16 + heads * key_dim * filled(value_dim, 32))


def filled(length: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-length // step) * step


NUM_SLICES: Final = 8
"""A sum over the inputs of a row-parallel linear is computed in up to this many slices, added as a binary tree: at most
the number of ranks that can share the model's heads.
"""


def num_slices(length: int, num_heads: int) -> int:
    """Slices of a whole sum over `length` heads or inputs, in a model of `num_heads`. Each slice costs an addition, so
    there are at most as many as ranks can share the heads: with an odd number of heads, a divisor of it.
    """
    if num_heads % 2 == 0:
        return gcd(NUM_SLICES, length, num_heads)
    common = gcd(length, num_heads)
    return next(count for count in range(NUM_SLICES, 0, -1) if common % count == 0)


def shares_evenly(num_heads: int, num_kv_heads: int, size: int) -> bool:
    """Whether each of `size` ranks can have the same number of query and KV heads: KV heads divide, or are repeated
    evenly.
    """
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def uneven_shares(num_heads: int, num_kv_heads: int, size: int) -> tuple[int, ...] | None:
    """Slices of each of `size` ranks that cannot share heads evenly: the same power of two for all, and the rest for
    the last, so that each has whole subtrees, which are added as ranks are. None where they share evenly, or where
    there are no such shares.
    """
    whole = num_slices(num_heads, num_heads)
    if shares_evenly(num_heads, num_kv_heads, size) or num_kv_heads % whole:
        return None
    each = 1
    while each * size < whole:
        each *= 2
    last = whole - each * (size - 1)
    return (each,) * (size - 1) + (last,) if 0 < last < each else None


def slices_of_rank(length: int, num_heads: int, num_kv_heads: int, rank: int, size: int) -> int:
    """Slices of one rank's share of a whole sum over `length` heads or inputs."""
    uneven = uneven_shares(num_heads, num_kv_heads, size)
    if uneven is not None:
        return uneven[rank]
    whole = num_slices(length, num_heads)
    return whole // size if whole % size == 0 else 1


def largest_share(num_heads: int, num_kv_heads: int, size: int) -> float:
    """The fraction of the heads, and of the work on them, of the rank that has most."""
    uneven = uneven_shares(num_heads, num_kv_heads, size)
    return 1 / size if uneven is None else max(uneven) / sum(uneven)


def uneven_shares_notice(num_heads: int, num_kv_heads: int, size: int) -> str:
    """Cost of unequal shares, for the log of a start."""
    uneven = uneven_shares(num_heads, num_kv_heads, size)
    assert uneven is not None, "they are unequal"
    heads = ", ".join(str(num_heads // sum(uneven) * share) for share in uneven)
    most = largest_share(num_heads, num_kv_heads, size)
    return (
        f"{num_heads} query and {num_kv_heads} KV heads are shared unequally by {size} ranks ({heads} query heads): a "
        f"step takes as long as {most:.0%} of the model, where equal shares would be {1 / size:.0%}"
    )


def next_power(count: int) -> int:
    """The next power of two, or the number where it is one."""
    return 1 << max(0, count - 1).bit_length()
