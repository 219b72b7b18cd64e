"""Adapters: what a low-rank adapter adds to the linears of a decoder layout, and its native form (`native/adapters.h`):
numbers by sixteens of ranks and of outputs.

A linear of a layout is a stack of modules, some of which have an adapter of their own. So what is added is
`b (scales * (a x))`, with the ranks of all modules one after the other, and each output has those of its own module.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.executors.cpu.packed_rows import NO_ROW
from holdfast.worker.executors.cpu.structures import NativeAdapted, NativeAdapter, NativeSpan
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


_LANES: Final = 16


class Site(NamedTuple):
    """A packed linear that adapters may add to."""

    rows: IntArray
    """The output of the linear that each packed one is; -1: zeros."""
    slices: int
    slice_length: int
    """Inputs of a slice, and what these are filled up to."""
    filled_length: int


class PackedAdapter:
    """One rank's share of an adapter. `native` and what it points to live as long as this."""

    def __init__(self, sites: Mapping[str, Site], adapted: Mapping[str, AdaptedLinear], dtype: torch.dtype) -> None:
        """Numbers are rounded to `dtype`, the model's. It touches nothing that a step uses."""
        self._kept: list[Any] = []
        self._dtype = dtype
        linears = [self._linear(site, adapted.get(place)) for place, site in sites.items()]
        self._linears = (NativeAdapted * len(linears))(*linears)
        self.native = NativeAdapter(linears=ctypes.addressof(self._linears))
        self.num_bytes = sum(part.nbytes for part in self._kept)

    def _linear(self, site: Site, added: AdaptedLinear | None) -> NativeAdapted:
        if added is None:
            return NativeAdapted()
        ranks = len(added.a)
        filled = -(-ranks // _LANES) * _LANES
        spans, numbers = _by_outputs(site.rows, added)
        scales = torch.zeros(filled)
        scales[:ranks] = added.scales
        return NativeAdapted(
            a=self._address(_by_ranks(site, added.a, filled).to(self._dtype)),
            b=self._address(numbers.to(self._dtype)),
            scales=self._address(scales),
            spans=self._address(spans),
            ranks=filled,
        )

    def _address(self, part: Tensor | np.ndarray) -> int:
        self._kept.append(part)
        address: int = part.data_ptr() if isinstance(part, Tensor) else part.ctypes.data
        return address


def _by_ranks(site: Site, a: Tensor, filled: int) -> Tensor:
    """[ranks / 16][inputs, slices filled up][16] of [ranks, inputs]."""
    out = torch.zeros(filled // _LANES, site.slices, site.filled_length, _LANES)
    whole = torch.zeros(filled, a.shape[1])
    whole[: len(a)] = a
    shape = filled // _LANES, _LANES, site.slices, site.slice_length
    out[:, :, : site.slice_length] = whole.view(shape).permute(0, 2, 3, 1)
    return out


def _by_outputs(rows: IntArray, added: AdaptedLinear) -> tuple[np.ndarray, Tensor]:
    """Spans of each sixteen of packed outputs, and their numbers, [ranks of the span][16] each."""
    is_there = rows != NO_ROW
    index = np.where(is_there, rows, 0)
    ranges = added.ranks_of[index]
    has_some = is_there & (ranges[:, 1] > ranges[:, 0])
    most = len(added.a)
    firsts = np.where(has_some, ranges[:, 0], most).reshape(-1, _LANES).min(axis=1)
    ends = np.where(has_some, ranges[:, 1], 0).reshape(-1, _LANES).max(axis=1)
    firsts = np.minimum(firsts, ends)
    lengths = (ends - firsts) * _LANES
    spans = np.zeros(len(firsts), dtype=np.dtype(NativeSpan))
    spans["first"], spans["end"], spans["place"] = firsts, ends, np.cumsum(lengths) - lengths
    blocks = added.b[torch.from_numpy(index)]
    blocks[torch.from_numpy(~is_there)] = 0.0
    blocks = blocks.view(-1, _LANES, most)
    numbers = torch.empty(int(lengths.sum()))
    alike = np.stack([firsts, ends], axis=1)
    for first, end in np.unique(alike, axis=0).tolist():
        of_span = np.flatnonzero((firsts == first) & (ends == end))
        if end > first:
            places = spans["place"][of_span][:, None] + np.arange((end - first) * _LANES)
            part = blocks[torch.from_numpy(of_span), :, first:end].transpose(1, 2).reshape(len(of_span), -1)
            numbers[torch.from_numpy(places)] = part
    return spans, numbers
