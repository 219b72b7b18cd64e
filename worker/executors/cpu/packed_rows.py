"""Rows of packed linears: the output of a linear that each packed row is, biases, addresses, and parts of a router."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.executors.linears import Linear

IntArray = NDArray[np.int64]

NO_ROW: Final = -1
"""Stands for zeros."""


def padded_places(inner: int, slices: int, tile: int) -> IntArray:
    """Real index of each packed inner one: slices are padded to whole tiles."""
    length = inner // slices
    padded = -(-length // tile) * tile
    place = np.arange(padded)
    real = np.where(place < length, place, NO_ROW)
    return np.concatenate([np.where(real == NO_ROW, NO_ROW, real + start) for start in range(0, inner, length)])


def gate_and_up(places: IntArray, inner: int, tile: int) -> IntArray:
    """Outputs of gate and up in turns of a tile, so that a group holds both of as many inner dimensions."""
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


_MOST_PARTS: Final = 3
"""Numbers in bfloat16 whose sum any number in float32 is."""


def in_dtype(router: Linear, dtype: torch.dtype) -> Linear:
    """A router in the model's dtype. One in float32 that this does not hold becomes several linears, whose sum it is:
    each has what the ones before left of its weights.
    """
    weight = router.weights[0] if router.weights else None
    if weight is None or weight.dtype == dtype:
        return router
    parts: list[Tensor] = []
    left = weight.detach().float()
    while len(parts) < _MOST_PARTS and (not parts or bool(left.any())):
        parts.append(left.to(dtype))
        left = left - parts[-1].float()
    return Linear(weights=tuple(parts), bias=router.bias)
