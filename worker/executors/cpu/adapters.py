"""Adapters: the addition of a low-rank adapter to the linears of a decoder layout, and its native form
(`native/adapters.h`): numbers by sixteens of ranks and of outputs.

A linear of a layout is a stack of modules, some of which have separate adapters. So the addition is `b (scales * (a
x))`, with the ranks of all modules one after the other, and each output uses the ranks of its module.
"""

import ctypes
from collections.abc import Mapping
from ctypes import CDLL, byref
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.cpu.adapted_outputs import LANES, AdaptedOutputs, Site
from holdfast.worker.executors.cpu.library import check_outcome
from holdfast.worker.executors.cpu.linear_structures import NativeAdapted, NativeAdapter, NativeLowRank
from holdfast.worker.executors.cpu.packed_rows import IntArray
from holdfast.worker.executors.cpu.part_packing import GROUP
from holdfast.worker.executors.cpu.tile_memory import mapped_memory
from holdfast.worker.executors.cpu.weight_codes import DTYPES
from holdfast.worker.executors.layout import Attention, DecoderLayout, Mlp
from holdfast.worker.executors.linears import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Matrices of one module, which adds `scale * b a x`."""

    a: Tensor
    """[rank, inputs], of a floating type, as stored."""
    b: Tensor
    """[outputs, rank]"""
    scale: float

    def __post_init__(self) -> None:
        assert self.a.stride(1) == 1, "inputs of a rank follow each other"
        assert self.b.is_contiguous(), "B is whole"

    @property
    def native(self) -> NativeLowRank:
        """The matrices as the library reads them, as long as this lives."""
        a, b = self.a, self.b
        types = DTYPES[a.dtype], DTYPES[b.dtype]
        return NativeLowRank(a.data_ptr(), b.data_ptr(), a.stride(0), self.scale, a.shape[0], *types)


@dataclass(frozen=True, kw_only=True)
class AdaptedLinear:
    """Numbers that are added to one linear."""

    parts: tuple[LowRank | None, ...]
    """Matrices of each of its modules, with the inputs of this rank and all outputs; None: the module has none."""
    part_of: IntArray
    """[outputs of this rank] the number of an output's module."""
    rows: IntArray
    """[outputs of this rank] which output of its module it is."""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each part; 0: there is none."""
        return tuple(0 if part is None else part.a.shape[0] for part in self.parts)

    @cached_property
    def native(self) -> ctypes.Array[NativeLowRank]:
        """The matrices as the library reads them, as long as this lives."""
        return (NativeLowRank * len(self.parts))(
            *(NativeLowRank() if one is None else one.native for one in self.parts)
        )


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


class Difference(NamedTuple):
    """Numbers that a step adds to the outputs of one module, beside the product of its matrices, for fixed inputs."""

    error: float
    """Largest difference; not a number where one of both is none."""
    largest: float
    """Largest number of that product."""
    usual: float
    """Usual size of such numbers: those of few ranks may cancel each other by chance."""


_NUMBERS_OF_LINE: Final = 32  # places are multiples of it: a cache line or two


class PackedAdapter:
    """One rank's share of an adapter. `native` and its arrays live as long as this."""

    def __init__(
        self, library: CDLL, sites: Mapping[str, Site], adapted: Mapping[str, AdaptedLinear], dtype: torch.dtype
    ) -> None:
        """Numbers are rounded to `dtype`, the model's. It touches nothing that a step uses."""
        self._library, self._dtype = library, dtype
        self._plans = {place: _Plan(sites[place], added) for place, added in adapted.items()}
        length = sum(plan.length for plan in self._plans.values())
        self._memory = mapped_memory(length * dtype.itemsize)
        """Memory of all matrices: small ones by themselves would get small pages."""
        numbers = torch.frombuffer(self._memory, dtype=dtype, count=length)
        scales = np.zeros(sum(plan.num_ranks for plan in self._plans.values()), dtype=np.float32)
        self._kept: list[Any] = [numbers, scales]
        self._linears = (NativeAdapted * len(sites))()
        self._numbers = {place: number for number, place in enumerate(sites)}
        address, address_of_scales = numbers.data_ptr(), scales.ctypes.data
        for place, plan in self._plans.items():
            b, spans = address + plan.length_of_a * dtype.itemsize, plan.spans.ctypes.data
            own = NativeAdapted(address, b, address_of_scales, spans, plan.num_ranks)
            self._pack(plan, adapted[place], own)
            _put_scales(adapted[place], scales)
            self._linears[self._numbers[place]] = own
            self._kept.append(plan.spans)
            scales = scales[plan.num_ranks :]
            address, address_of_scales = address + plan.length * dtype.itemsize, address_of_scales + own.ranks * 4
        self.native = NativeAdapter(linears=ctypes.addressof(self._linears))

    def _pack(self, plan: "_Plan", added: AdaptedLinear, to: NativeAdapted) -> None:
        site, outputs = plan.site, plan.outputs
        sizes = site.slices, site.slice_length, site.filled_length, len(plan.spans)
        arrays = outputs.part_of.ctypes.data, outputs.rows_of.ctypes.data, to.spans
        of_parts = added.native, len(added.parts), DTYPES[self._dtype]
        outcome = self._library.native_pack_adapted(*of_parts, *sizes, *arrays, to.a, to.b)
        check_outcome(outcome, "the packing of an adapter")

    def compare(self, place: str, adapted: AdaptedLinear, row: Tensor) -> list[Difference]:
        """Numbers that a step adds to one row of a linear's outputs, beside `scale * b a x` of the matrices of each of
        its modules; zeros of a module that has none. `row`: float32 inputs [inputs of this rank], numbers that the
        model's dtype has. On the calling thread, beside any step.
        """
        found, num_parts = self.added(place, row), len(adapted.parts)
        differences = np.empty((num_parts, 3), dtype=np.float32)
        place_of = self._plans[place].outputs.place_of
        outcome = self._library.native_compare_added(
            *(adapted.native, num_parts, DTYPES[self._dtype], row.data_ptr(), row.shape[0]),
            *(adapted.part_of.ctypes.data, adapted.rows.ctypes.data, place_of.ctypes.data, len(place_of)),
            *(found.ctypes.data, differences.ctypes.data),
        )
        check_outcome(outcome, "the proof of an adapter")
        return [Difference(*numbers) for numbers in differences.tolist()]

    def added(self, place: str, row: Tensor) -> np.ndarray:
        """Numbers that a step adds to one row of a linear's packed outputs, float32, with inputs as for `compare`."""
        site = self._plans[place].site
        filled = site.filled(row, torch.bfloat16 if self._dtype == torch.bfloat16 else torch.float32)
        packed = np.empty(len(site.rows), dtype=np.float32)
        sizes = site.slices, site.filled_length, len(site.rows) // GROUP
        linear = byref(self._linears[self._numbers[place]])
        self._library.native_added(linear, DTYPES[self._dtype], filled.data_ptr(), *sizes, packed.ctypes.data)
        return packed


class _Plan:
    """Places of the numbers of one linear's adapter, in separate memory."""

    def __init__(self, site: Site, added: AdaptedLinear) -> None:
        self.site = site
        self.outputs: AdaptedOutputs = site.outputs(added.part_of, added.rows)
        self.num_ranks = -(-sum(added.ranks) // LANES) * LANES
        """Ranks, filled up."""
        self.spans = self.outputs.spans(added.ranks)
        self.length_of_a = self.num_ranks * site.slices * site.filled_length
        last = self.spans[-1]
        of_b = int(last["place"]) + int(last["end"] - last["first"]) * LANES
        self.length = -(-(self.length_of_a + of_b) // _NUMBERS_OF_LINE) * _NUMBERS_OF_LINE


def _put_scales(added: AdaptedLinear, scales: np.ndarray) -> None:
    """Writes the scale of each rank, those of one part after those of the other."""
    first = 0
    for rank, part in zip(added.ranks, added.parts, strict=True):
        if part is not None:
            scales[first : first + rank] = part.scale
        first += rank
