"""Adapters: the addition of a low-rank adapter to the linears of a decoder layout, and its native form
(`native/adapters.h`): numbers by sixteens of ranks and of outputs.

A linear of a layout is a stack of modules, some of which have separate adapters. So the addition is `b (scales * (a
x))`, with the ranks of all modules one after the other, and each output uses the ranks of its module.
"""

import ctypes
from collections.abc import Mapping
from ctypes import CDLL, byref
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from holdfast.worker.executors.cpu.adapted_outputs import LANES, AdaptedOutputs, SingleOutputs, Site, WholeBlocks
from holdfast.worker.executors.cpu.linear_structures import NativeAdapted, NativeAdapter
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLinear:
    """Numbers that are added to one linear."""

    parts: tuple[LowRank | None, ...]
    """Matrices of each of its modules, with the inputs of this rank and all outputs; None: the module has none."""
    part_of: IntArray
    """[outputs of this rank] the number of an output's module."""
    rows: IntArray
    """[outputs of this rank] which output of its module it is."""


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


_NUMBERS_OF_LINE: Final = 32  # places are multiples of it: a cache line or two


class PackedAdapter:
    """One rank's share of an adapter. `native` and its arrays live as long as this."""

    def __init__(
        self, library: CDLL, sites: Mapping[str, Site], adapted: Mapping[str, AdaptedLinear], dtype: torch.dtype
    ) -> None:
        """Numbers are rounded to `dtype`, the model's. It touches nothing that a step uses."""
        self._library, self._dtype = library, dtype
        plans = {place: _Plan(sites[place], added) for place, added in adapted.items()}
        length = sum(plan.length for plan in plans.values())
        self._memory = mapped_memory(length * dtype.itemsize)
        """Memory of all matrices: small ones by themselves would get small pages."""
        numbers = torch.frombuffer(self._memory, dtype=dtype, count=length)
        self._kept: list[Any] = [numbers]
        self._linears = (NativeAdapted * len(sites))()
        self._packed: dict[str, tuple[NativeAdapted, _Plan]] = {}
        for number, place in enumerate(sites):
            if (plan := plans.get(place)) is not None:
                plan.write(numbers[: plan.length])
                self._linears[number] = self._described(plan, numbers)
                self._packed[place] = self._linears[number], plan
                numbers = numbers[plan.length :]
        self.native = NativeAdapter(linears=ctypes.addressof(self._linears))

    def _described(self, plan: "_Plan", numbers: Tensor) -> NativeAdapted:
        parts = (plan.scales, plan.spans)
        self._kept.extend(parts)
        return NativeAdapted(
            a=numbers.data_ptr(),
            b=numbers[plan.length_of_a :].data_ptr(),
            scales=plan.scales.ctypes.data,
            spans=plan.spans.ctypes.data,
            ranks=len(plan.scales),
        )

    def added(self, place: str, row: Tensor) -> Tensor:
        """Numbers that a step adds to one row of a linear's outputs: float32 [outputs of this rank], of float32 inputs
        [inputs of this rank], which are rounded as a step's are. On the calling thread, beside any step.
        """
        linear, plan = self._packed[place]
        site, kind = plan.site, torch.bfloat16 if self._dtype == torch.bfloat16 else torch.float32
        filled = F.pad(row.view(site.slices, -1), (0, site.filled_length - site.slice_length)).to(kind)
        packed, groups = torch.empty(len(site.rows)), len(site.rows) // GROUP
        dims = site.slices, site.filled_length, groups
        self._library.native_added(byref(linear), DTYPES[self._dtype], filled.data_ptr(), *dims, packed.data_ptr())
        return packed[plan.outputs.place_of]


class _Plan:
    """Places of the numbers of one linear's adapter, in separate memory."""

    def __init__(self, site: Site, added: AdaptedLinear) -> None:
        self.site, self._added = site, added
        self.outputs: AdaptedOutputs = site.outputs(added.part_of, added.rows)
        ranks = np.array([0 if part is None else len(part.a) for part in added.parts])
        total = int(ranks.sum())
        self._firsts = np.cumsum(ranks) - ranks
        self.scales = np.zeros(-(-total // LANES) * LANES, dtype=np.float32)
        self.scales[:total] = np.repeat([0.0 if part is None else part.scale for part in added.parts], ranks)
        self.spans = self.outputs.spans(ranks)
        self.length_of_a = len(self.scales) * site.slices * site.filled_length
        last = self.spans[-1]
        of_b = int(last["place"]) + int(last["end"] - last["first"]) * LANES
        self.length = -(-(self.length_of_a + of_b) // _NUMBERS_OF_LINE) * _NUMBERS_OF_LINE

    def write(self, numbers: Tensor) -> None:
        """Writes to memory [length] of zeros."""
        units, dtype = _units(numbers), numbers.dtype
        present = [(number, part) for number, part in enumerate(self._added.parts) if part is not None]
        self._write_a(units[: self.length_of_a], [_units(part.a.to(dtype)) for _, part in present])
        lines = units[self.length_of_a :].reshape(-1, LANES)
        for number, part in present:
            b = _units(part.b.to(dtype))
            self._write_whole(lines, b, self.outputs.whole[number])
            self._write_single(lines, b, self.outputs.single[number], int(self._firsts[number]))

    def _write_a(self, units: np.ndarray, parts: list[np.ndarray]) -> None:
        """[ranks / 16][inputs, slices filled up][16]"""
        site, tiles = self.site, len(self.scales) // LANES
        whole = np.zeros((tiles * LANES, parts[0].shape[1]), dtype=units.dtype)
        np.concatenate(parts, out=whole[: sum(map(len, parts))])
        to = units.reshape(tiles, site.slices, site.filled_length, LANES)[:, :, : site.slice_length]
        np.copyto(to, whole.reshape(tiles, LANES, site.slices, site.slice_length).transpose(0, 2, 3, 1))

    def _write_whole(self, lines: np.ndarray, b: np.ndarray, whole: WholeBlocks) -> None:
        """[ranks][16] of each block."""
        if not len(whole.blocks):
            return
        rank = b.shape[1]
        blocks = b[whole.rows].reshape(-1, LANES, rank).transpose(0, 2, 1)
        firsts = self.spans["place"][whole.blocks] // LANES
        steps = np.diff(firsts)
        if len(steps) and (steps == steps[0]).all():  # one copy
            strides = (int(steps[0]) * lines.strides[0], *lines.strides)
            np.copyto(as_strided(lines[firsts[0] :], (len(firsts), rank, LANES), strides), blocks)
        else:
            lines[firsts[:, None] + np.arange(rank)] = blocks

    def _write_single(self, lines: np.ndarray, b: np.ndarray, single: SingleOutputs, first: int) -> None:
        """Lanes of other blocks, whose ranks begin before `first`, the module's first."""
        if len(single.blocks):
            spans = self.spans[single.blocks]
            firsts = spans["place"] // LANES + first - spans["first"]
            lines[firsts[:, None] + np.arange(b.shape[1]), single.lanes[:, None]] = b[single.rows]


def _units(numbers: Tensor) -> np.ndarray:
    """The same memory as whole numbers of that size: NumPy has no bfloat16."""
    return numbers.view(_UNITS[numbers.itemsize]).numpy()


_UNITS: Final = {2: torch.int16, 4: torch.int32}
"""Integers of a size in bytes, as which numbers of that size are read."""
