"""Slices of sums and ranks' shares of them: the sum of all ranks is the tree of one rank, whatever they hold."""

from itertools import pairwise

import pytest

from holdfast.worker.executors.layout_arithmetic import (
    largest_share,
    num_slices,
    shares_evenly,
    slices_of_rank,
    uneven_shares,
    uneven_shares_notice,
)


def tree(parts: list[str]) -> str:
    """Neighbours are added, then neighbours of those; who has none waits."""
    while len(parts) > 1:
        odd = parts[-1:] if len(parts) % 2 else []
        parts = [f"({left}+{right})" for left, right in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


@pytest.mark.parametrize("size", range(1, 9))
def test_what_ranks_add_up_is_the_tree_of_one(size):
    every = [(heads, kv_heads) for heads in range(1, 41) for kv_heads in range(1, heads + 1) if heads % kv_heads == 0]
    for heads, kv_heads in every:
        whole = num_slices(heads, heads)
        uneven = uneven_shares(heads, kv_heads, size)
        shares = [slices_of_rank(heads, heads, kv_heads, rank, size) for rank in range(size)]
        if uneven is None and whole % size:
            assert shares == [1] * size, (
                "ranks that share evenly, and not in slices of the whole, have sums of their own"
            )
            continue
        assert sum(shares) == whole
        assert all(before >= after for before, after in pairwise(shares))
        names = [str(number) for number in range(whole)]
        ends = [sum(shares[: rank + 1]) for rank in range(size)]
        held = [tree(names[end - share : end]) for share, end in zip(shares, ends, strict=True)]
        assert tree(held) == tree(names)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "expected"),
    [
        (9, 3, 2, (2, 1)),
        (9, 3, 3, None),
        (15, 5, 3, (2, 2, 1)),
        (15, 5, 2, (4, 1)),
        (21, 7, 2, (4, 3)),
        (14, 2, 2, None),
        (12, 4, 3, None),
        (24, 8, 3, None),
        (9, 1, 2, None),
        (8, 8, 3, None),
    ],
)
def test_unequal_shares(heads, kv_heads, size, expected):
    assert uneven_shares(heads, kv_heads, size) == expected
    if expected is not None:
        assert not shares_evenly(heads, kv_heads, size)
        assert largest_share(heads, kv_heads, size) == max(expected) / sum(expected)


def test_an_even_number_of_heads_has_the_slices_that_it_always_had():
    assert [num_slices(heads, heads) for heads in (2, 4, 6, 8, 12, 14, 32)] == [2, 4, 2, 8, 4, 2, 8]
    assert [num_slices(inner, 32) for inner in (11008, 48, 100, 33)] == [8, 8, 4, 1]


def test_what_it_costs_is_told():
    assert "(6, 3 query heads)" in uneven_shares_notice(9, 3, 2)
    assert "67% of the model, where equal shares would be 50%" in uneven_shares_notice(9, 3, 2)
