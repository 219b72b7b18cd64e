"""Slices of row-parallel sums, and which ranks have which. Plain data: needs no torch.

A sum over heads, or over inner features, is taken in slices that are added as a binary tree: neighbours, then
neighbours of those. Ranks that hold whole subtrees add up the rest of the same tree, and so have the bits of one rank.
"""

from math import gcd
from typing import Final

NUM_SLICES: Final = 8
"""A sum over the inputs of a row-parallel linear is taken in up to this many slices, added as a binary tree: in no more
than ranks can share the heads of the model."""


def num_slices(length: int, num_heads: int) -> int:
    """Slices of a whole sum over `length` heads or inputs, in a model of `num_heads`. Each costs an addition, so there
    are no more of them than ranks can share the heads: with an odd number of heads, as many as divide it.
    """
    if num_heads % 2 == 0:
        return gcd(NUM_SLICES, length, num_heads)
    common = gcd(length, num_heads)
    return next(count for count in range(NUM_SLICES, 0, -1) if common % count == 0)


def shares_evenly(num_heads: int, num_kv_heads: int, size: int) -> bool:
    """Whether each of `size` ranks can have as many query and KV heads: KV heads divide, or are repeated evenly."""
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def uneven_shares(num_heads: int, num_kv_heads: int, size: int) -> tuple[int, ...] | None:
    """Slices of each of `size` ranks that cannot share heads evenly: the same power of two for all, and what is left
    for the last, so that each has whole subtrees, and those are added as ranks are. None where they share evenly, or
    where there are no such shares.
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


def told_of_uneven(num_heads: int, num_kv_heads: int, size: int) -> str:
    """Cost of unequal shares, in words for those who start a model."""
    uneven = uneven_shares(num_heads, num_kv_heads, size)
    assert uneven is not None, "they are unequal"
    heads = ", ".join(str(num_heads // sum(uneven) * share) for share in uneven)
    most = largest_share(num_heads, num_kv_heads, size)
    return (
        f"{num_heads} query and {num_kv_heads} KV heads are shared unequally by {size} ranks ({heads} query heads): a "
        f"step takes as long as {most:.0%} of the model, where equal shares would be {1 / size:.0%}"
    )
