"""Packing of weights in E4M3 as codes (`native/coded_order.h`): they take eight bits a number in memory, and products
make numbers of them.
"""

from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import dataclass
from math import gcd
from typing import Final

import numpy as np
import torch

from holdfast.worker.executors.cpu.library import check_outcome
from holdfast.worker.executors.cpu.packed_rows import IntArray, rows_of_each
from holdfast.worker.executors.cpu.running_step import array_address
from holdfast.worker.executors.cpu.tile_memory import NOT_FINITE, PANEL, Arena
from holdfast.worker.executors.finite import refuse
from holdfast.worker.executors.stored_matrix import BytesAndScales, StoredMatrix

_K_TILE: Final = 32  # inputs of a tile
_LEAST, _MOST = 2.0**-117, 2.0**118
"""Magnitudes of scales of which no number is flushed to zero or infinite, 2^8 times as large either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCodes:
    """Memory of a weight's panels."""

    address: int
    panel_bytes: int
    code_run: int
    """Tiles of inputs that share scales."""


def pack_codes(
    weights: Sequence[StoredMatrix], rows: IntArray, slices: int, arena: Arena, library: CDLL, pool: int
) -> PackedCodes | None:
    """Packs weights, stacked along the outputs, on a pool's threads. None where one of them has another form: codes of
    another type, zero points, a scale that ends within a tile of inputs, or one that is very small or large. Raises
    `NotFiniteError` for a code that is a NaN.

    `rows`, of which there are a multiple of 32, says which output each packed one is; -1: zeros.
    """
    parts = [part for weight in weights if (part := weight.bytes_and_scales(*weight.rows)) and _fits(part)]
    inputs = weights[0].shape[1]
    if len(parts) < len(weights) or inputs % (slices * _K_TILE):
        return None
    run = gcd(*(int(end) for part in parts for end in part.ends)) // _K_TILE
    k_tiles = inputs // _K_TILE
    panel_bytes = library.native_coded_bytes(k_tiles, run)
    packed = PackedCodes(address=arena.take(len(rows) // PANEL * panel_bytes), panel_bytes=panel_bytes, code_run=run)
    if arena.is_packed:
        return packed
    addresses = np.zeros(len(rows), dtype=np.uint64)
    scales = np.zeros((len(rows), k_tiles // run), dtype=np.float32)
    starts = np.arange(k_tiles // run) * run * _K_TILE
    for part, (_, own, places) in zip(parts, rows_of_each(weights, rows), strict=True):
        addresses[places] = part.codes.data_ptr() + own * part.codes.stride(0)
        scales[places] = part.scales.numpy()[own][:, np.searchsorted(part.ends, starts, side="right")]
    sources, shape = (array_address(addresses), array_address(scales)), (len(rows), k_tiles, run)
    outcome = library.native_pack_codes(pool, *sources, *shape, packed.address)
    check_outcome(outcome, "the packing of a weight's codes")
    if outcome & NOT_FINITE:
        refuse((len(rows), inputs), parts[0].codes.dtype)
    return packed


def _fits(part: BytesAndScales) -> bool:
    magnitudes = part.scales.abs()
    has_range = (magnitudes == 0) | ((magnitudes >= _LEAST) & (magnitudes <= _MOST))
    is_plain = part.codes.dtype == torch.float8_e4m3fn and not bool(part.zeros.any())
    return is_plain and bool(has_range.all()) and not (part.ends % _K_TILE).any()
