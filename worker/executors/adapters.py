"""Adapters: what a low-rank adapter adds to the linears of a decoder layout, as plain data of one rank.

A linear of a layout is a stack of modules, some of which have an adapter of their own. So what is added is
`b (scales * (a x))`, with the ranks of all modules one after the other, and each output has those of its own module.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.executors.layout import Attention, DecoderLayout, Mlp
from holdfast.worker.executors.linears import Linear

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLinear:
    """Numbers that are added to one linear."""

    a: Tensor
    """float32 [ranks, inputs of this rank]"""
    b: Tensor
    """float32 [outputs of this rank, ranks]: zeros at the ranks of other modules."""
    scales: Tensor
    """float32 [ranks]"""
    ranks_of: IntArray
    """[outputs, 2]: first and end of the ranks that an output has numbers of; equal: it has none."""


def adaptable(layout: DecoderLayout) -> dict[str, Linear]:
    """The linears that adapters may add to, by their place in the layout: attention's and dense MLPs'."""
    found: dict[str, Linear] = {}
    for index, layer in enumerate(layout.layers):
        if isinstance(layer.attention, Attention):
            found[f"{index}.qkv"] = layer.attention.qkv
            found[f"{index}.output"] = layer.attention.output
        if isinstance(layer.mlp, Mlp):
            found[f"{index}.up"] = layer.mlp.up
            found[f"{index}.down"] = layer.mlp.down
    return found
