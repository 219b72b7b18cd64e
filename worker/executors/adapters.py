"""Adapters: the addition of a low-rank adapter to the linears of a decoder layout, as all executors see it.

A linear of a layout is a stack of modules, some of which have separate adapters. So the addition is `b (scales * (a
x))`, with the ranks of all modules one after the other, and each output uses the ranks of its module.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.layout import Attention, DecoderLayout, Mlp
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.step_batch import IntArray


class StoredMatrix(NamedTuple):
    """A matrix in the content of a file, row by row."""

    dtype: torch.dtype
    shape: tuple[int, int]
    first: int
    """Place of its first byte."""

    def of(self, content: memoryview) -> Tensor:
        """Its numbers, in place."""
        count = self.shape[0] * self.shape[1]
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(content, dtype=self.dtype, count=count, offset=self.first).view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Matrices of one module, which adds `scale * b a x`."""

    a: StoredMatrix
    """[rank, inputs], of a floating type."""
    b: StoredMatrix
    """[outputs, rank]"""
    scale: float


@dataclass(frozen=True, kw_only=True)
class AdaptedLinear:
    """Numbers that are added to one linear."""

    parts: tuple[LowRank | None, ...]
    """Matrices of each of its modules; None: the module has none."""
    part_of: IntArray
    """[outputs of this rank] the number of an output's module."""
    rows: IntArray
    """[outputs of this rank] which output of its module it is."""
    columns: IntArray
    """[inputs of this rank] which input of its modules each is."""
    probe: Tensor
    """[inputs of this rank] fixed inputs, float32, by which it is proved: numbers that the model's dtype has."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each part; 0: there is none."""
        return tuple(0 if part is None else part.a.shape[0] for part in self.parts)

    @property
    def is_run(self) -> bool:
        """Whether its inputs follow each other."""
        return np.array_equal(self.columns, np.arange(len(self.columns)) + self.columns[0])


HEAD: Final = "head"
EMBEDDING: Final = "embedding"
"""Places of the linear behind the layers, and of the table before them: its addition is that of a linear whose inputs
are one for the row's token, and zero for all others.
"""


def adaptable(layout: DecoderLayout) -> dict[str, Linear]:
    """The linears that adapters may add to, by their place in the layout: attention's, dense MLPs', and the head."""
    found: dict[str, Linear] = {}
    for index, layer in enumerate(layout.layers):
        if isinstance(layer.attention, Attention):
            found[f"{index}.qkv"] = layer.attention.qkv
            found[f"{index}.output"] = layer.attention.output
        if isinstance(layer.mlp, Mlp):
            found[f"{index}.up"] = layer.mlp.up
            found[f"{index}.down"] = layer.mlp.down
    return found | {HEAD: layout.head}


class Difference(NamedTuple):
    """Numbers that a step adds to the outputs of one module, beside the product of its matrices, for fixed inputs."""

    error: float
    """Largest difference; not a number where one of both is none."""
    largest: float
    """Largest number of that product."""
    usual: float
    """Usual size of such numbers: those of few ranks may cancel each other by chance."""
