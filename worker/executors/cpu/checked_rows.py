"""Rows that come from memory that another process may write to: copied and checked in one pass."""

from collections.abc import Sequence
from operator import add
from typing import Final

import numpy as np
from xxhash import xxh3_128_digest

from holdfast.worker.executors.block_layout import Bytes
from holdfast.worker.executors.cpu.library import load_library
from holdfast.worker.executors.row_places import ROW_DIGEST_BYTES

LEAST_BYTES: Final = 241
"""Shorter rows are left to the package: XXH3 has other rules for them (`native/digest.h`)."""


def copy_checked(
    source: Bytes, into: Bytes, firsts: Sequence[int], lengths: Sequence[int], seeds: Sequence[int]
) -> bool:
    """Copies rows, behind each of which is its digest, to the same places of `into`. Whether the digests of what has
    come there are right: `source` may change meanwhile.
    """
    assert len(firsts) == len(lengths) == len(seeds), "a place, a length and a seed for each row"
    assert min(firsts) >= 0 <= min(lengths), "places in both"
    assert max(map(add, firsts, lengths)) <= min(len(source) - ROW_DIGEST_BYTES, len(into)), "places in both"
    if min(lengths) < LEAST_BYTES:
        return all(
            _copy_short(source[first:], into[first : first + length], seed)
            for first, length, seed in zip(firsts, lengths, seeds, strict=True)
        )
    numbers = np.array((firsts, lengths), np.int64), np.array(seeds, np.uint64)
    are_right: int = load_library().native_copy_checked(
        len(firsts),
        source.ctypes.data,
        into.ctypes.data,
        numbers[0][0].ctypes.data,
        numbers[0][1].ctypes.data,
        numbers[1].ctypes.data,
    )
    return bool(are_right)


def _copy_short(source: Bytes, row: Bytes, seed: int) -> bool:
    row[:] = source[: len(row)]
    return xxh3_128_digest(row.data, seed) == source[len(row) :][:ROW_DIGEST_BYTES].tobytes()
