"""Outputs of packed linears that adapters may add to: which packed output is which output of which module. They are the
same for all adapters, so they are found once for each linear.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.worker.executors.adapters import place_of_all
from holdfast.worker.executors.cpu.linear_structures import NativeSpan
from holdfast.worker.executors.cpu.packed_rows import NO_ROW, IntArray

LANES: Final = 16
"""Packed outputs of a block, and ranks that are computed together."""


class AdaptedOutputs:
    """Packed outputs of one linear by its modules."""

    def __init__(self, packed_rows: IntArray, part_of: IntArray, rows: IntArray) -> None:
        """`packed_rows`: [packed outputs] which output of the linear each is, -1: padding. `part_of` and `rows`:
        [outputs] the number of an output's module, and which output of that module it is.
        """
        self._packed_rows, self._part_of, self._rows = packed_rows, part_of, rows
        is_there = packed_rows != NO_ROW
        index = np.where(is_there, packed_rows, 0)
        self.part_of = np.where(is_there, part_of[index], -1).astype(np.int32)
        """[packed outputs] the number of the module that each is of; -1: padding."""
        self.rows_of = rows[index].astype(np.int32)
        """[packed outputs] which output of that module it is."""
        self.place_of = np.empty(len(rows), dtype=np.int64)
        """[outputs] the packed output that each output of the linear is."""
        self.place_of[packed_rows[is_there]] = np.flatnonzero(is_there)
        self._last: tuple[tuple[int, ...], np.ndarray] | None = None

    def are_of(self, part_of: IntArray, rows: IntArray) -> bool:
        """Whether they were made from these arrays."""
        return self._part_of is part_of and self._rows is rows

    def spans(self, ranks: tuple[int, ...]) -> np.ndarray:
        """Ranks of the modules of each block, as `NativeSpan`; kept for the next call with the same ranks. `ranks`: of
        each module, 0: it has no adapter.
        """
        last = self._last
        if last is None or last[0] != ranks:
            self._last = last = ranks, self._spans(np.array(ranks))
        return last[1]

    def _spans(self, ranks: IntArray) -> np.ndarray:
        ends = np.cumsum(ranks)
        firsts = np.append(np.where(ranks > 0, ends - ranks, ends[-1]), ends[-1])  # at -1: padding
        lasts = np.append(np.where(ranks > 0, ends, 0), 0)
        own = self.part_of.reshape(-1, LANES)
        first, last = firsts[own].min(axis=1), lasts[own].max(axis=1)
        lengths = np.maximum(last - first, 0) * LANES
        spans = np.zeros(len(own), dtype=_SPAN)
        spans["first"], spans["end"] = np.minimum(first, last), last
        spans["place"] = np.cumsum(lengths) - lengths
        return spans


_SPAN: Final = np.dtype(NativeSpan)


class Site:
    """A packed linear that adapters may add to."""

    def __init__(self, rows: IntArray, slices: int, slice_length: int, filled_length: int) -> None:
        """`rows`: [packed outputs] the output of the linear that each is, -1: zeros. `slice_length`: inputs of a slice;
        `filled_length`: their padded number.
        """
        self.rows = rows
        self.slices = slices
        self.slice_length = slice_length
        self.filled_length = filled_length
        self._outputs: AdaptedOutputs | None = None
        self._filled: tuple[Tensor, torch.dtype, Tensor] | None = None

    def outputs(self, part_of: IntArray, rows: IntArray) -> AdaptedOutputs:
        """Its outputs by module; kept for the next call with the same arrays. Safe to call from any thread."""
        found = self._outputs
        if found is None or not found.are_of(part_of, rows):
            self._outputs = found = AdaptedOutputs(self.rows, part_of, rows)
        return found

    @property
    def num_outputs(self) -> int:
        """Outputs of the linear."""
        return int(self.rows.max()) + 1

    def has_rows(self, rows: IntArray) -> bool:
        """Whether its packed outputs are these."""
        return np.array_equal(self.rows, rows)

    def of_first(self, count: int) -> "Site":
        """The same where adapters add to the first outputs alone."""
        rows = np.where(self.rows < count, self.rows, NO_ROW)
        return Site(rows, self.slices, self.slice_length, self.filled_length)

    def filled(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """Inputs [inputs] of the linear, each slice filled up, of a dtype; kept for the next call with the same row."""
        last = self._filled
        if last is None or last[0] is not row or last[1] != dtype:
            slices = F.pad(row.view(self.slices, -1), (0, self.filled_length - self.slice_length))
            self._filled = last = row, dtype, slices.to(dtype)
        return last[2]


class Sites:
    """All packed linears of a model that adapters may add to, and the numbers of their records in an adapter: first one
    for each place, with one for all experts' linears of a kind; then those of the experts.
    """

    def __init__(self, by_place: Mapping[str, Site]) -> None:
        """`by_place`: in order of the places' numbers (`numbered`)."""
        self.by_place = by_place
        numbers = numbered(by_place)
        self.num_sites = len(numbers)
        of_experts: dict[str, list[str]] = {}
        for place in by_place:
            if place not in numbers:
                of_experts.setdefault(place_of_all(place), []).append(place)
        self.mixtures: list[tuple[int, int, int]] = []
        """Number of the place, first record and count of the experts' linears of a kind."""
        self.number_of = {place: numbers[place] for place in by_place if place in numbers}
        self.num_records = self.num_sites
        for name, places in of_experts.items():
            self.mixtures.append((numbers[name], self.num_records, len(places)))
            self.number_of |= {place: number for number, place in enumerate(places, self.num_records)}
            self.num_records += len(places)


def numbered(places: Iterable[str]) -> dict[str, int]:
    """Numbers of places, from 0 on; linears of experts have the number of all of them together."""
    return {place: number for number, place in enumerate(dict.fromkeys(map(place_of_all, places)))}
