"""Packing of single parts of a decoder layout: linears as tiles or units, tables of embeddings, vectors. Their sources
are consumed: the memory is returned, so that weights are in memory once.
"""

from collections.abc import Mapping
from ctypes import CDLL
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.executors.adapters import place_of_all
from holdfast.worker.executors.cpu.adapted_outputs import Site
from holdfast.worker.executors.cpu.code_packing import PackedCodes, pack_codes
from holdfast.worker.executors.cpu.library import check_outcome
from holdfast.worker.executors.cpu.linear_structures import NativeLinear, NativeNorm, NativeUnits
from holdfast.worker.executors.cpu.packed_rows import (
    NO_ROW,
    IntArray,
    padded_places,
    placed,
    put_rows,
    row_addresses,
    with_rows,
)
from holdfast.worker.executors.cpu.tile_memory import (
    NOT_FINITE,
    Arena,
    Compactor,
    CompactTiles,
    FreedWeights,
    PlainTiles,
    TileMemory,
    TileShape,
)
from holdfast.worker.executors.cpu.unit_packing import PackedUnits, pack_units
from holdfast.worker.executors.finite import check_finite, refuse
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.mapped_files import discard_contents

GROUP: Final = 64
"""Outputs that are computed together."""
TILE: Final = 32
"""Inputs of a tile."""
PIECE_BYTES: Final = 16 << 20
"""Packed together, and then given back: so much of the weights is in memory twice."""


class PartPacker:
    """Packs parts, on the threads of a pool, into an arena. They live as long as this."""

    dtype: int
    """Number of the layout's dtype, one of `DTYPES`."""
    _sites: dict[str, Site]
    """The linears that adapters may add to, by place; those of experts that are alike have one."""
    _library: CDLL
    _pool: int
    _arena: Arena
    _number_type: torch.dtype
    """Type of the numbers in tiles."""
    _itemsize: int
    """Bytes of a number in a tile."""
    _kept: list[Any]
    _compactor: Compactor | None
    """Makes tiles compact; None: they stay as they are."""
    _keeps_codes: bool
    """Whether weights of E4M3 stay codes, where their form allows it."""
    _spent: FreedWeights | None = None
    """The weights whose memory is given back; None: they stay."""
    _places: Mapping[int, tuple[int, str]] = MappingProxyType({})
    """Number and place of each linear that adapters may add to, by its identity."""

    def _norm(self, norm: Norm | None) -> NativeNorm:
        if norm is None:
            return NativeNorm()
        return NativeNorm(
            weight=self._floats(norm.weight),
            bias=None if norm.bias is None else self._floats(norm.bias),
            eps=norm.eps,
            is_layer_norm=int(norm.kind == "layer"),
            stays=int(norm.stays),
        )

    def _linear(self, linear: Linear, *, slices: int = 1, rows: IntArray | None = None) -> NativeLinear:
        """Packs a linear. `rows` says which output of the linear each packed one is; -1: zeros."""
        in_order = rows is None and len(linear.weights) == 1
        rows = np.arange(linear.out_features) if rows is None else rows
        groups = -(-len(rows) // GROUP)
        rows = np.concatenate([rows, np.full(groups * GROUP - len(rows), NO_ROW)])
        slice_tiles = -(-(linear.in_features // slices) // TILE)
        k_tiles = slices * slice_tiles
        if linear.units:
            spent = self._spent is not None
            memory_of = self._arena, self._library, self._pool
            packed = pack_units(linear.units, rows, *memory_of, uses_up=spent)
            return self._described(linear, rows, slices, slice_tiles, packed)
        if linear.codes and self._keeps_codes:
            codes = pack_codes(linear.stored, rows, slices, self._arena, self._library, self._pool)
            if codes is not None:
                self._give_back(linear)
                return self._described(linear, rows, slices, slice_tiles, codes)
        memory = self._memory(TileShape(len(rows), k_tiles * TILE * self._itemsize, k_tiles))
        if self._arena.is_packed:
            if self._spent is not None:
                self._spent.read(linear.weights, slice(None))
        elif linear.codes:
            self._pack_codes(linear, rows, memory, slices=slices)
        else:
            self._pack(linear, rows, memory, slices=slices, in_order=in_order)
        self._give_back(linear)
        return self._described(linear, rows, slices, slice_tiles, memory)

    def _give_back(self, linear: Linear) -> None:
        """Gives back the memory of codes that have been packed."""
        for code in linear.stored if self._spent is not None else ():
            discard_contents(code.mapped)

    def _described(
        self,
        linear: Linear,
        rows: IntArray,
        slices: int,
        slice_tiles: int,
        memory: TileMemory | PackedUnits | PackedCodes,
    ) -> NativeLinear:
        units = memory if isinstance(memory, PackedUnits) else None
        self._kept.append(units)
        site, place = self._places.get(id(linear), (0, ""))
        if site:
            self._sites[place] = self._site(place, rows, slices, linear.in_features // slices, slice_tiles * TILE)
        return NativeLinear(
            tiles=memory.address,
            site=site,
            bias=None if linear.bias is None else self._floats(placed(linear.bias, rows)),
            slices=slices,
            slice_tiles=slice_tiles,
            groups=len(rows) // GROUP,
            outputs=linear.out_features,
            panel_bytes=memory.panel_bytes,
            code_run=memory.code_run if isinstance(memory, PackedCodes) else 0,
            units=NativeUnits() if units is None else units.form,
            panels=None if units is None else units.panels,
        )

    def _site(self, place: str, rows: IntArray, slices: int, slice_length: int, filled_length: int) -> Site:
        """The site of a linear; experts that are alike share one."""
        first = self._sites.get(f"{place_of_all(place)}.0")
        if first is not None and first.has_rows(rows):
            return first
        return Site(rows, slices, slice_length, filled_length)

    def _put_head_sites(self, linear: Linear, packed: NativeLinear, outputs: int, inputs: int) -> None:
        """Makes each head of a linear the site of its place, of which the packed linear has the last one's."""
        place = place_of_all(self._places[id(linear)][1])
        site = Site(padded_places(outputs, 1, GROUP), 1, inputs, packed.slice_tiles * TILE)
        for head in range(linear.out_features // outputs):
            self._sites[f"{place}.{head}"] = site

    def _memory(self, shape: TileShape) -> TileMemory:
        return (
            PlainTiles(self._arena, shape)
            if self._compactor is None
            else CompactTiles(self._arena, shape, self._compactor)
        )

    def _pack(self, linear: Linear, rows: IntArray, memory: TileMemory, *, slices: int, in_order: bool) -> None:
        """Writes a linear's tiles to memory, a piece after the other."""
        weights = [with_rows(weight) for weight in linear.weights]
        addresses = row_addresses(weights)
        pointers = np.where(rows == NO_ROW, 0, addresses[rows]).astype(np.uint64)
        step = self._rows_of_piece(linear, slices)
        for first in range(0, len(rows), step):
            self._pack_rows(pointers[first : first + step], linear, slices, memory, first)
            if self._spent is not None and in_order:
                self._spent.read(linear.weights, slice(first, first + step))
        if self._spent is not None and not in_order:
            self._spent.read(linear.weights, slice(None))

    def _pack_codes(self, linear: Linear, rows: IntArray, memory: TileMemory, *, slices: int) -> None:
        """The same of a linear in codes, whose numbers are made for each piece."""
        step = self._rows_of_piece(linear, slices)
        room = torch.zeros(min(step, len(rows)), linear.in_features, dtype=self._number_type)
        for first in range(0, len(rows), step):
            own = rows[first : first + step]
            addresses = put_rows(linear.stored, own, room)
            self._pack_rows(addresses.astype(np.uint64), linear, slices, memory, first)

    def _pack_rows(
        self, pointers: NDArray[np.uint64], linear: Linear, slices: int, memory: TileMemory, first: int
    ) -> None:
        """Writes the tiles of rows `first` onwards, which begin at these addresses."""
        slice_length = linear.in_features // slices
        shape = len(pointers), slices, slice_length, -(-slice_length // TILE), self.dtype

        def pack(out: int, panel_bytes: int) -> int:
            outcome = self._library.native_pack(self._pool, pointers.ctypes.data, *shape, panel_bytes, out)
            check_outcome(outcome, "the packing of a weight")
            return int(outcome)

        if memory.write(first, pack) & NOT_FINITE:
            refuse((linear.out_features, linear.in_features), self._number_type)

    def _rows_of_piece(self, linear: Linear, slices: int) -> int:
        row_bytes = slices * -(-(linear.in_features // slices) // TILE) * TILE * self._itemsize
        return max(1, PIECE_BYTES // (row_bytes * GROUP)) * GROUP

    def _embedding(self, table: Tensor, *, is_kept: bool = True) -> int:
        """The table as it is: rows are read from it, in a file or in memory. Unless it `is_kept`, pages of a file that
        the check has read are given back.
        """
        if not self._arena.is_packed:
            for first in range(0, len(table), rows := max(1, PIECE_BYTES // table[0].nbytes)):
                check_finite(table[first : first + rows])
                if not is_kept and self._spent is not None:
                    self._spent.give_back(table[first : first + rows])
        return self._address(table.contiguous())

    def _floats(self, tensor: Tensor) -> int:
        """A float32 copy, readable somewhat beyond its end: rows are read sixteen numbers at a time."""
        flat = tensor.detach().float().flatten()
        copy = torch.zeros(-(-len(flat) // 16) * 16 + 16)
        copy[: len(flat)] = flat
        return self._address(copy)

    def _lines(self, rows: Tensor) -> int:
        """A float32 copy of [rows, n], each row filled up to whole sixteens."""
        filled = torch.zeros(len(rows), -(-rows.shape[1] // 16) * 16)
        filled[:, : rows.shape[1]] = rows.detach().float()
        return self._floats(filled)

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def site_of_table(layout: DecoderLayout) -> Site:
    """The embedding as a linear that adapters may add to: its inputs are tokens of this rank."""
    rows = len(layout.embedding)
    return Site(padded_places(layout.hidden_size, 1, GROUP), 1, rows, -(-rows // TILE) * TILE)
