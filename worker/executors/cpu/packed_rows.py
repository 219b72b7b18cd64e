"""Rows of packed linears: which output of a linear each packed row is, and what else goes with it."""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
