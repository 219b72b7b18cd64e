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
from torch import Tensor

from holdfast.worker.executors.cpu.linear_structures import NativeAdapted, NativeAdapter, NativeSpan
from holdfast.worker.executors.cpu.packed_rows import NO_ROW, IntArray, Site
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


_LANES: Final = 16
_NUMBERS_OF_LINE: Final = 32  # places are multiples of it: a cache line or two


class PackedAdapter:
    """One rank's share of an adapter. `native` and its arrays live as long as this."""

    def __init__(
        self, library: CDLL, sites: Mapping[str, Site], adapted: Mapping[str, AdaptedLinear], dtype: torch.dtype
    ) -> None:
        """Numbers are rounded to `dtype`, the model's. It touches nothing that a step uses."""
        self._library, self._sites, self._dtype = library, sites, dtype
        plans = {place: _Plan(sites[place], added) for place, added in adapted.items()}
        length = sum(plan.length for plan in plans.values())
        self._memory = mapped_memory(length * dtype.itemsize)
        """Memory of all matrices: small ones by themselves would get small pages."""
        numbers = torch.frombuffer(self._memory, dtype=dtype, count=length)
        self._kept: list[Any] = [numbers]
        self._linears = (NativeAdapted * len(sites))()
        for number, place in enumerate(sites):
            if (plan := plans.get(place)) is not None:
                plan.write(numbers[: plan.length])
                self._linears[number] = self._described(plan, numbers)
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
        site, number = self._sites[place], list(self._sites).index(place)
        kind = torch.bfloat16 if self._dtype == torch.bfloat16 else torch.float32
        filled = F.pad(row.view(site.slices, -1), (0, site.filled_length - site.slice_length)).to(kind)
        packed, groups = torch.empty(len(site.rows)), len(site.rows) // GROUP
        dims = site.slices, site.filled_length, groups
        self._library.native_added(
            byref(self._linears[number]), DTYPES[self._dtype], filled.data_ptr(), *dims, packed.data_ptr()
        )
        is_there = torch.from_numpy(site.rows != NO_ROW)
        out = torch.empty(int(site.rows.max()) + 1)
        out[torch.from_numpy(site.rows)[is_there]] = packed[is_there]
        return out


class _Plan:
    """Places of the numbers of one linear's adapter, in separate memory."""

    def __init__(self, site: Site, added: AdaptedLinear) -> None:
        self._site, self._added = site, added
        ranks = [0 if part is None else len(part.a) for part in added.parts]
        ends = np.cumsum(ranks)
        self._firsts = ends - ranks
        filled = -(-int(ends[-1]) // _LANES) * _LANES
        self.scales = np.zeros(filled, dtype=np.float32)
        self.scales[: ends[-1]] = np.repeat([0.0 if part is None else part.scale for part in added.parts], ranks)
        self.spans = self._spans(ends)
        self.length_of_a = filled * site.slices * site.filled_length
        last = self.spans[-1]
        of_b = int(last["place"]) + int(last["end"] - last["first"]) * _LANES
        self.length = -(-(self.length_of_a + of_b) // _NUMBERS_OF_LINE) * _NUMBERS_OF_LINE

    def _spans(self, ends: np.ndarray) -> np.ndarray:
        """Ranks of the modules of each sixteen packed outputs."""
        is_there = self._site.rows != NO_ROW
        index = np.where(is_there, self._site.rows, 0)
        self._rows = self._added.rows[index].reshape(-1, _LANES)
        self._own = np.where(is_there, self._added.part_of[index], -1).reshape(-1, _LANES)
        has_some = np.append(ends > self._firsts, False)  # -1: an output that is not there
        firsts = np.where(has_some, np.append(self._firsts, 0), ends[-1])[self._own].min(axis=1)
        last = np.where(has_some, np.append(ends, 0), 0)[self._own].max(axis=1)
        lengths = np.maximum(last - firsts, 0) * _LANES
        spans = np.zeros(len(firsts), dtype=np.dtype(NativeSpan))
        spans["first"], spans["end"] = np.minimum(firsts, last), last
        spans["place"] = np.cumsum(lengths) - lengths
        return spans

    def write(self, numbers: Tensor) -> None:
        """Writes to memory [length] of zeros."""
        present = [(number, part) for number, part in enumerate(self._added.parts) if part is not None]
        self._write_a(numbers[: self.length_of_a], [part for _, part in present])
        for number, part in present:
            self._write_b(numbers[self.length_of_a :], number, part)

    def _write_a(self, numbers: Tensor, parts: list[LowRank]) -> None:
        """[ranks / 16][inputs, slices filled up][16]"""
        site, filled = self._site, len(self.scales)
        whole = torch.zeros(filled, parts[0].a.shape[1], dtype=numbers.dtype)
        torch.cat([part.a.to(numbers.dtype) for part in parts], out=whole[: sum(len(part.a) for part in parts)])
        to = numbers.view(filled // _LANES, site.slices, site.filled_length, _LANES)
        to[:, :, : site.slice_length] = whole.view(-1, _LANES, site.slices, site.slice_length).permute(0, 2, 3, 1)

    def _write_b(self, numbers: Tensor, number: int, part: LowRank) -> None:
        """[ranks][16] of each span."""
        b, rank = part.b.to(numbers.dtype), part.b.shape[1]
        is_own = self._own == number
        is_whole = is_own.all(axis=1)
        if is_whole.any():
            blocks = _rows_of(b, self._rows[is_whole]).transpose(1, 2)
            firsts, lines = self.spans["place"][is_whole] // _LANES, numbers.view(-1, _LANES)
            if _is_run(firsts, rank):
                lines[firsts[0] : firsts[0] + blocks.shape[0] * rank].view(-1, rank, _LANES).copy_(blocks)
            else:
                lines[torch.from_numpy(firsts[:, None] + np.arange(rank))] = blocks
        block, lane = np.nonzero(is_own & ~is_whole[:, None])
        if block.size:
            first = self.spans["place"][block] + (self._firsts[number] - self.spans["first"][block]) * _LANES + lane
            places = first[:, None] + np.arange(rank) * _LANES
            numbers[torch.from_numpy(places)] = b[torch.from_numpy(self._rows[block, lane])]


def _is_run(numbers: IntArray, step: int = 1) -> bool:
    """Whether each is larger than the one before by `step`."""
    return bool((np.diff(numbers) == step).all())


def _rows_of(b: Tensor, rows: IntArray) -> Tensor:
    """Rows of b [outputs, rank] by their numbers [blocks, 16]: [blocks, 16, rank]. Of a run no copy is made."""
    flat = rows.reshape(-1)
    if _is_run(flat):
        return b[flat[0] : flat[0] + len(flat)].reshape(*rows.shape, -1)
    return b[torch.from_numpy(rows)]
