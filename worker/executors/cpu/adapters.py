"""The native form of adapters (`native/adapters.h`): numbers by sixteens of ranks and of outputs."""

import mmap
from collections.abc import Mapping
from ctypes import CDLL
from typing import Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.adapters import RATES, STATE, AdaptedLinear, Difference, FileContent
from holdfast.worker.executors.cpu.adapted_outputs import LANES, AdaptedOutputs, Site, Sites
from holdfast.worker.executors.cpu.library import check_outcome
from holdfast.worker.executors.cpu.linear_structures import (
    NativeAdapted,
    NativeAdaptedSite,
    NativeAdapter,
    NativeLowRank,
)
from holdfast.worker.executors.cpu.tile_memory import address_of
from holdfast.worker.executors.cpu.weight_codes import DTYPES

_NUMBERS_OF_LINE: Final = 32  # places are multiples of it: a cache line or two
_STORED: Final = {**DTYPES, torch.float64: 3}  # of matrices in files (`native/adapter_numbers.h`)
_LOW_RANK, _SITE, _ADAPTED = (np.dtype(one) for one in (NativeLowRank, NativeAdaptedSite, NativeAdapted))


class AdapterPlan:
    """Plan of packing all adapters of one form: everything but the matrices' numbers."""

    def __init__(self, sites: Sites, adapted: Mapping[str, AdaptedLinear], dtype: torch.dtype) -> None:
        """Numbers are rounded to `dtype`, the model's."""
        self.dtype, self.of_model = dtype, sites
        parts = [(place, *part) for place, one in adapted.items() for part in _at_sites(sites, place, one)]
        parts.sort(key=lambda part: part[2].end)
        self.places = [(place, len(one.parts)) for place, _, one in parts]
        """The place that each packed linear is a part of, and the number of its modules; in the file's order."""
        self.ends = np.array([one.end for _, _, one in parts], dtype=np.int64)
        """Bytes of the file that each of them needs."""
        plans = [_Plan(sites.by_place[site], one) for _, site, one in parts]
        ends = np.cumsum([0, *(plan.length for plan in plans)]) * dtype.itemsize
        self.num_bytes = int(ends[-1])
        self.scales = np.concatenate([np.zeros(0, dtype=np.float32), *(plan.scales for plan in plans)])
        """Scales of the parts of all ranks."""
        self.parts = np.array([part for _, _, one in parts for part in _parts(one)], dtype=_LOW_RANK)
        """Matrices of all linears; their addresses are places in a file's content."""
        self.adapted = np.zeros(len(plans), dtype=_ADAPTED)
        """Packed matrices of each linear; addresses are places in memory, and among the scales."""
        self.sites = np.zeros(len(plans), dtype=_SITE)
        """Parts that each linear is packed from; addresses of parts are places among them."""
        self._kept = plans  # their arrays
        self.first_parts = np.cumsum([0, *(len(one.parts) for _, _, one in parts)])
        """The first of the parts of each linear."""
        first_rank = 0
        for index, ((_, site, _), plan) in enumerate(zip(parts, plans, strict=True)):
            a = int(ends[index])
            b = a + plan.length_of_a * dtype.itemsize
            self.adapted[index] = a, b, first_rank * 4, plan.spans.ctypes.data, len(plan.scales), 0
            self.sites[index] = plan.native(self.first_parts[index] * _LOW_RANK.itemsize, dtype, sites.number_of[site])
            first_rank += len(plan.scales)


class PackedAdapter:
    """One rank's share of an adapter. `native` and its arrays live as long as this."""

    def __init__(self, library: CDLL, plan: AdapterPlan, content: FileContent, memory: mmap.mmap) -> None:
        """`content`: of the file; what is there is packed while the rest is read. `memory`: of at least
        `plan.num_bytes`, for all packed matrices: small ones by themselves would get small pages. It touches nothing
        that a step uses.
        """
        self._library, self._plan, self.memory = library, plan, memory
        self.num_bytes = plan.num_bytes
        self.scales = plan.scales.copy()
        own = plan.adapted.copy()
        own["a"] += address_of(memory)
        own["b"] += address_of(memory)
        own["scales"] += self.scales.ctypes.data
        self.linears = np.zeros(plan.of_model.num_records, dtype=_ADAPTED)
        """Records of all linears that may have adapters."""
        self.linears[plan.sites["number"]] = own
        for number, first, count in plan.of_model.mixtures:
            if most := self.linears["ranks"][first : first + count].max():
                self.linears[number] = 0, 0, 0, 0, most, self.linears[first:].ctypes.data
        self.native = NativeAdapter(linears=self.linears.ctypes.data)
        self.differences = self._load(content, packs=True)
        """Differences between what a step adds and the matrices, for each part of each linear: `adapter_places.py`
        judges them.
        """

    def compare(self, content: FileContent) -> dict[str, list[Difference]]:
        """The differences once more, as it is packed now."""
        return self._load(content, packs=False)

    def _load(self, content: FileContent, *, packs: bool) -> dict[str, list[Difference]]:
        plan, parts, sites = self._plan, self._plan.parts.copy(), self._plan.sites.copy()
        address = np.frombuffer(content.there(1), dtype=np.uint8).ctypes.data
        parts["a"] += address
        parts["b"] += address
        sites["parts"] += parts.ctypes.data
        found, done = np.empty((len(parts), 3), dtype=np.float32), 0
        while done < len(sites):
            there = len(content.there(int(plan.ends[done])))
            reached = int(np.searchsorted(plan.ends, there, side="right"))
            arrays = sites[done:].ctypes.data, self.linears.ctypes.data, reached - done, DTYPES[plan.dtype], packs
            outcome = self._library.native_load_adapter(*arrays, found[plan.first_parts[done] :].ctypes.data)
            check_outcome(outcome, "an adapter")
            done = reached
        rows, differences = iter(found.tolist()), dict[str, list[Difference]]()
        for place, count in plan.places:
            some = [Difference(*next(rows)) for _ in range(count)]
            if (others := differences.get(place)) is not None:  # of the place's other outputs
                some = [one.with_other(other) for one, other in zip(some, others, strict=True)]
            differences[place] = some
        return differences


def _at_sites(sites: Sites, place: str, one: AdaptedLinear) -> list[tuple[str, AdaptedLinear]]:
    """Parts of what is added at a place, by packed linear: the last outputs of a recurrence are a linear of their own
    where they are quantized in another way.
    """
    count = sites.by_place[place].num_outputs
    if count == len(one.rows):
        return [(place, one)]
    rest = place.replace(STATE, RATES)
    assert len(one.rows) - count == sites.by_place[rest].num_outputs, "both are all outputs"
    return [(place, one.some(slice(count))), (rest, one.some(slice(count, None)))]


class _Plan:
    """Places of the numbers of one linear's adapter, in separate memory."""

    def __init__(self, site: Site, added: AdaptedLinear) -> None:
        self.site, self.added = site, added
        self.outputs: AdaptedOutputs = site.outputs(added.part_of, added.rows)
        self.scales = _scales(added)
        self.spans = self.outputs.spans(added.ranks)
        self.length_of_a = len(self.scales) * site.slices * site.filled_length
        last = self.spans[-1]
        of_b = int(last["place"]) + int(last["end"] - last["first"]) * LANES
        self.length = -(-(self.length_of_a + of_b) // _NUMBERS_OF_LINE) * _NUMBERS_OF_LINE
        self._kept: tuple[Tensor, ...] = ()

    def native(self, parts: int, dtype: torch.dtype, number: int) -> tuple[int, ...]:
        """Fields of `NativeAdaptedSite`."""
        site, added, outputs = self.site, self.added, self.outputs
        filled = site.filled(added.probe, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        self._kept = (filled,)
        columns = 0 if added.is_run else added.columns.ctypes.data
        sizes = site.slice_length, site.filled_length
        packed = outputs.part_of.ctypes.data, outputs.rows_of.ctypes.data
        of_outputs = added.part_of.ctypes.data, added.rows.ctypes.data, outputs.place_of.ctypes.data
        counts = len(outputs.place_of), len(added.parts), site.slices, len(self.spans), number
        return parts, *sizes, *packed, columns, added.probe.data_ptr(), filled.data_ptr(), *of_outputs, *counts


def _scales(added: AdaptedLinear) -> np.ndarray:
    """The scale of each rank, those of one part after those of the other; zeros of those that fill them up."""
    own = [(rank, part.scale) for rank, part in zip(added.ranks, added.parts, strict=True) if part is not None]
    scales = np.repeat(np.array([scale for _, scale in own], dtype=np.float32), [rank for rank, _ in own])
    return np.pad(scales, (0, -len(scales) % LANES))


def _parts(added: AdaptedLinear) -> list[tuple[int | float, ...]]:
    """Fields of `NativeLowRank`."""
    first = int(added.columns[0]) if added.is_run else 0
    return [
        (0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0)
        if part is None
        else (
            part.a.first + first * part.a.step * part.a.dtype.itemsize,
            part.b.first,
            part.a.row_stride,
            part.a.step,
            part.b.row_stride,
            part.b.step,
            part.scale,
            part.a.shape[0],
            _STORED[part.a.dtype],
            _STORED[part.b.dtype],
        )
        for part in added.parts
    ]
