"""Rows of packed linears: the output of a linear that each packed row is, biases, addresses, and parts of a router."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.executors.cpu.weight_codes import put_numbers
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.stored_matrix import AT_ONCE, StoredMatrix, for_all

IntArray = NDArray[np.int64]

NO_ROW: Final = -1
"""Stands for zeros."""


def padded_places(inner: int, slices: int, tile: int, before: int = 0) -> IntArray:
    """Real index of each packed inner one: slices are padded to whole tiles, and begin with `before` others."""
    length = inner // slices
    padded = -(-(before + length) // tile) * tile
    place = np.arange(padded) - before
    real = np.where((place >= 0) & (place < length), place, NO_ROW)
    return np.concatenate([np.where(real == NO_ROW, NO_ROW, real + start) for start in range(0, inner, length)])


def gate_and_up(places: IntArray, inner: int, tile: int) -> IntArray:
    """Outputs of gate and up, alternating by tile, so that a group holds the same inner dimensions of both."""
    gates = places.reshape(-1, 1, tile)
    ups = np.where(gates == NO_ROW, NO_ROW, gates + inner)
    return np.concatenate([gates, ups], axis=1).reshape(-1)


def placed(bias: Tensor, rows: IntArray) -> Tensor:
    """The bias of each packed output."""
    index = torch.from_numpy(np.maximum(rows, 0))
    return bias.detach().float()[index].masked_fill(torch.from_numpy(rows == NO_ROW), 0.0)


def with_rows(weight: Tensor) -> Tensor:
    """The weight with each row in one piece."""
    return weight if weight.stride(-1) == 1 else weight.contiguous()


def row_addresses(weights: Sequence[Tensor]) -> IntArray:
    """Address of each row of some weights, one weight after the other."""
    rows = [
        weight.data_ptr() + np.arange(weight.shape[0], dtype=np.int64) * weight.stride(0) * weight.itemsize
        for weight in weights
    ]
    return np.concatenate(rows)


def put_rows(weights: Sequence[StoredMatrix], rows: IntArray, out: Tensor) -> IntArray:
    """Writes the numbers of some rows of stacked weights to the first rows of `out`, on all threads. Returns the
    address of each; 0: it is a row of zeros, and nothing was written.
    """
    addresses = np.zeros(len(rows), dtype=np.int64)
    for weight, own, places in rows_of_each(weights, rows):
        runs = runs_of(own, max(1, AT_ONCE // weight.shape[1]))
        for_all(partial(_put_run, weight, own, places, out, runs), range(len(runs)))
        addresses[places] = out.data_ptr() + places * out.stride(0) * out.itemsize
    return addresses


def _put_run(
    weight: StoredMatrix, own: IntArray, places: IntArray, out: Tensor, runs: list[tuple[int, int]], number: int
) -> None:
    start, end = runs[number]
    first = weight.rows[0] + int(own[start])
    last, places = first + end - start, places[start:end]
    coded = weight.bytes_and_scales(first, last)
    if coded is None:
        out[torch.from_numpy(places)] = weight.numbers(first, last).to(out.dtype)
    else:
        put_numbers(coded, out, places)


def rows_of_each(weights: Sequence[StoredMatrix], rows: IntArray) -> Iterator[tuple[StoredMatrix, IntArray, IntArray]]:
    """For each of several stacked weights: its own rows that are among `rows`, ascending, and their places there.
    Rows of padding are none.
    """
    first = 0
    for weight in weights:
        places = np.flatnonzero((rows >= first) & (rows < first + weight.rows[1] - weight.rows[0]))
        places = places[np.argsort(rows[places], kind="stable")]
        yield weight, rows[places] - first, places
        first += len(weight)


def runs_of(own: IntArray, most: int) -> list[tuple[int, int]]:
    """Places in `own` from which to which numbers follow one another; `most` at a time."""
    ends = [*(np.flatnonzero(np.diff(own) != 1) + 1), len(own)] if len(own) else []
    return [(at, min(at + most, end)) for start, end in pairwise([0, *ends]) for at in range(start, end, most)]


_MAX_PARTS: Final = 3
"""Numbers in bfloat16 whose sum any number in float32 is."""


def in_dtype(router: Linear, dtype: torch.dtype) -> Linear:
    """A router in the model's dtype. A float32 weight that this form does not hold becomes several linears that add up
    to it: each has the remainder of the ones before.
    """
    weight = router.weights[0] if router.weights else None
    if weight is None or weight.dtype == dtype:
        return router
    parts: list[Tensor] = []
    left = weight.detach().float()
    while len(parts) < _MAX_PARTS and (not parts or bool(left.any())):
        parts.append(left.to(dtype))
        left = left - parts[-1].float()
    return Linear(weights=tuple(parts), bias=router.bias)
