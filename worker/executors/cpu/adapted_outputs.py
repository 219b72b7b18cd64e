"""Outputs of packed linears that adapters may add to: which packed output is which output of which module. They are the
same for all adapters, so they are found once for each linear.
"""

from typing import Final, NamedTuple

import numpy as np

from holdfast.worker.executors.cpu.linear_structures import NativeSpan
from holdfast.worker.executors.cpu.packed_rows import NO_ROW, IntArray

LANES: Final = 16
"""Packed outputs of a block, and ranks that are computed together."""


class WholeBlocks(NamedTuple):
    """Blocks whose outputs are all of one module."""

    blocks: IntArray
    """[blocks] their numbers."""
    rows: IntArray | slice
    """[blocks * 16] which outputs of the module these are; a slice where they follow each other."""


class SingleOutputs(NamedTuple):
    """Outputs of one module in blocks that hold others too, or padding."""

    blocks: IntArray
    lanes: IntArray
    rows: IntArray


class AdaptedOutputs:
    """Packed outputs of one linear by its modules."""

    def __init__(self, packed_rows: IntArray, part_of: IntArray, rows: IntArray) -> None:
        """`packed_rows`: [packed outputs] which output of the linear each is, -1: padding. `part_of` and `rows`:
        [outputs] the number of an output's module, and which output of that module it is.
        """
        self._packed_rows, self._part_of, self._rows = packed_rows, part_of, rows
        is_there = packed_rows != NO_ROW
        index = np.where(is_there, packed_rows, 0)
        of_module = rows[index].reshape(-1, LANES)
        self._own = np.where(is_there, part_of[index], -1).reshape(-1, LANES)
        is_whole = (self._own == self._own[:, :1]).all(axis=1)
        self._mixed = np.flatnonzero(~is_whole)
        numbers = range(int(part_of.max()) + 1)
        self.whole = [_whole_blocks(is_whole & (self._own[:, 0] == number), of_module) for number in numbers]
        self.single = [_single_outputs((self._own == number) & ~is_whole[:, None], of_module) for number in numbers]
        self.place_of = np.empty(len(rows), dtype=np.int64)
        """[outputs] the packed output that each output of the linear is."""
        self.place_of[packed_rows[is_there]] = np.flatnonzero(is_there)

    def are_of(self, part_of: IntArray, rows: IntArray) -> bool:
        """Whether they were made from these arrays."""
        return self._part_of is part_of and self._rows is rows

    def spans(self, ranks: IntArray) -> np.ndarray:
        """Ranks of the modules of each block, as `NativeSpan`. `ranks`: of each module, 0: it has no adapter."""
        ends = np.cumsum(ranks)
        firsts, none = np.where(ranks > 0, ends - ranks, ends[-1]), ends[-1:]
        firsts, lasts = np.append(firsts, none), np.append(np.where(ranks > 0, ends, 0), 0)  # at -1: padding
        first, last = firsts[self._own[:, 0]], lasts[self._own[:, 0]]
        if len(self._mixed):
            first[self._mixed] = firsts[self._own[self._mixed]].min(axis=1)
            last[self._mixed] = lasts[self._own[self._mixed]].max(axis=1)
        lengths = np.maximum(last - first, 0) * LANES
        spans = np.zeros(len(first), dtype=_SPAN)
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

    def outputs(self, part_of: IntArray, rows: IntArray) -> AdaptedOutputs:
        """Its outputs by module; kept for the next call with the same arrays. Safe to call from any thread."""
        found = self._outputs
        if found is None or not found.are_of(part_of, rows):
            self._outputs = found = AdaptedOutputs(self.rows, part_of, rows)
        return found


def _whole_blocks(is_own: np.ndarray, of_module: IntArray) -> WholeBlocks:
    rows = of_module[is_own].reshape(-1)
    is_run = bool(len(rows)) and bool((np.diff(rows) == 1).all())
    return WholeBlocks(np.flatnonzero(is_own), slice(int(rows[0]), int(rows[-1]) + 1) if is_run else rows)


def _single_outputs(is_own: np.ndarray, of_module: IntArray) -> SingleOutputs:
    blocks, lanes = np.nonzero(is_own)
    return SingleOutputs(blocks, lanes, of_module[blocks, lanes])
