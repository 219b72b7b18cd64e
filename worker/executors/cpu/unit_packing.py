"""Packing of quantized weights into units (`native/units.h`): codes are read from their files piece by piece, so that
few of them are in memory twice.
"""

from collections.abc import Sequence
from ctypes import CDLL, byref
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.coded import SCALE_TYPES, UNIT, Offset, UnitForm, Units
from holdfast.worker.executors.cpu.library import check_outcome
from holdfast.worker.executors.cpu.linear_structures import NativePanel, NativeUnits
from holdfast.worker.executors.cpu.packed_rows import IntArray, rows_of_each, runs_of
from holdfast.worker.executors.cpu.running_step import array_address
from holdfast.worker.executors.cpu.tile_memory import Arena
from holdfast.worker.executors.finite import check_finite
from holdfast.worker.executors.mapped_files import discard_contents
from holdfast.worker.executors.stored_matrix import StoredMatrix, for_all

PIECE_CODES: Final = 16 << 20
"""Codes that are read, a byte each, and then packed."""
_PIECE_IN_FILE: Final = 64 << 20
"""The same of codes that are packed from where they are stored: scales of units alone are in memory."""
_READ_AT_ONCE: Final = 1 << 20
"""Codes that a thread reads together."""

_FROM_LOWEST, _FROM_MIDDLE, _PAIRS = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedUnits:
    """Memory of a weight's panels."""

    address: int
    panel_bytes: int
    form: NativeUnits
    """Form of the panels; of the first ones, where they have several."""
    panels: Any = None
    """Array of `NativePanel`, where they have several forms."""


def pack_units(
    weights: Sequence[StoredMatrix],
    rows: IntArray,
    arena: Arena,
    library: CDLL,
    pool: int,
    *,
    uses_up: bool,
) -> PackedUnits:
    """Packs weights, stacked along the outputs, on a pool's threads. `uses_up`: no later step reads them. Raises
    `NotFiniteError` for scales or minima with a NaN or an infinity.

    `rows`, of which there are a multiple of 32, says which output each packed one is; -1: zeros. Outputs of other
    forms share no panel of 32.
    """
    panels = rows.reshape(-1, UNIT)
    forms, of_panel = _forms_of_panels(weights, panels)
    own = [np.flatnonzero(of_panel == number) for number in range(len(forms))]
    packed = [
        _pack_form(form, weights, panels[places].reshape(-1), arena, library, pool)
        for form, places in zip(forms, own, strict=True)
    ]
    for weight in weights if uses_up else ():
        discard_contents(weight.mapped)
    if len(packed) == 1:
        return packed[0]
    described = (NativePanel * len(panels))()
    for part, places in zip(packed, own, strict=True):
        for index, place in enumerate(places.tolist()):
            described[place] = NativePanel(first=part.address + index * part.panel_bytes, units=part.form)
    return replace(packed[0], panels=described)


def _forms_of_panels(weights: Sequence[StoredMatrix], panels: IntArray) -> tuple[list[UnitForm], IntArray]:
    """The forms of some weights, and the number among these of that of each panel of rows; of one without rows, 0."""
    of_weights = [weight.unit_form for weight in weights]
    forms = [form for form in dict.fromkeys(of_weights) if form is not None]
    assert None not in of_weights, "they lie in units"
    ends = np.cumsum([len(weight) for weight in weights])
    numbers = np.array([forms.index(form) for form in of_weights if form is not None])
    of_rows = numbers[np.searchsorted(ends, np.maximum(panels, 0), side="right")]
    is_row = panels >= 0
    most, least = (np.where(is_row, of_rows, -1).max(1), np.where(is_row, of_rows, len(forms)).min(1))
    assert (~is_row.any(1) | (most == least)).all(), "outputs of other forms share no panel"
    return forms, np.maximum(most, 0)


def _pack_form(
    form: UnitForm, weights: Sequence[StoredMatrix], rows: IntArray, arena: Arena, library: CDLL, pool: int
) -> PackedUnits:
    """Packs rows of one form, of some weights."""
    num_units = weights[0].shape[1] // UNIT
    panel_bytes = form.panel_bytes(num_units)
    scales = SCALE_TYPES.index(form.scales)
    native = NativeUnits(bits=form.bits, offset=form.offset.value, scales=scales, before=form.before)
    packed = PackedUnits(address=arena.take(len(rows) // UNIT * panel_bytes), panel_bytes=panel_bytes, form=native)
    if not arena.is_packed:
        at_once = _PIECE_IN_FILE if all(weight.lies_in_units for weight in weights) else PIECE_CODES
        step = max(1, at_once // (num_units * UNIT * UNIT)) * UNIT
        for first in range(0, len(rows), step):
            piece = _Piece(weights, rows[first : first + step], form.offset)
            out = packed.address + first // UNIT * panel_bytes
            outcome = library.native_pack_units(pool, *piece.addresses, len(piece.codes), num_units, byref(native), out)
            check_outcome(outcome, "the packing of a quantized weight")
    return packed


class _Piece:
    """Addresses [rows] of the parts of some packed rows, 0 for rows of zeros. They live as long as this."""

    def __init__(self, weights: Sequence[StoredMatrix], rows: IntArray, offset: Offset) -> None:
        self.codes = np.zeros(len(rows), dtype=np.uint64)
        self.scales, self.offsets, self.factors = (np.zeros_like(self.codes) for _ in range(3))
        self._offset = offset
        self._kept: list[object] = []
        self._stored = np.zeros(len(rows), dtype=np.uint8)
        """Form of each row's codes, by its number in `native/packing_units.cpp`."""
        for weight, own, places in rows_of_each(weights, rows):
            self._read(weight, own, places)

    @property
    def addresses(self) -> tuple[int, int, int, int | None, int | None]:
        """Addresses of the five arrays."""
        offsets = None if self._offset is Offset.MIDDLE else array_address(self.offsets)
        factors = array_address(self.factors) if self._offset.num_factors else None
        own = array_address(self.codes), array_address(self._stored), array_address(self.scales)
        return *own, offsets, factors

    def _read(self, weight: StoredMatrix, own: IntArray, places: IntArray) -> None:
        """Rows of a weight, and where in the piece they are: some that follow one another at a time, by all threads."""
        runs = runs_of(own, len(own) if weight.lies_in_units else max(1, _READ_AT_ONCE // weight.shape[1]))

        def read(number: int) -> None:
            start, end = runs[number]
            first = weight.rows[0] + int(own[start])
            self._note(weight.units(first, first + end - start), places[start:end])

        for_all(read, range(len(runs)))

    def _note(self, units: Units, places: IntArray) -> None:
        self._kept.append(units)
        check_finite(units.scales)
        self.codes[places], self._stored[places] = _row_addresses(units.codes), _stored(units)
        self.scales[places] = _row_addresses(units.scales)
        if units.offsets is not None:
            check_finite(units.offsets)
            self.offsets[places] = _row_addresses(units.offsets)
        if units.factors is not None:
            check_finite(units.factors)
            self.factors[places] = _row_addresses(units.factors)


def _stored(units: Units) -> int:
    if units.codes.dtype == torch.int8:
        return _FROM_MIDDLE
    return _FROM_LOWEST if units.codes.shape[1] == units.scales.shape[1] * UNIT else _PAIRS


def _row_addresses(tensor: Tensor) -> IntArray:
    """Address of each row of a tensor whose rows are contiguous."""
    assert tensor[0].is_contiguous(), "a row lies in one piece"
    return tensor.data_ptr() + np.arange(len(tensor), dtype=np.int64) * tensor.stride(0) * tensor.itemsize
