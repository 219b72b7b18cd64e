"""Codes for weights, made by the native library: of 4 bits, whose scales are searched for the least error, and of 8;
and numbers of the latter.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.executors.cpu.library import load_library
from holdfast.worker.executors.finite import refuse
from holdfast.worker.executors.stored_matrix import AT_ONCE, BytesAndScales, for_all

DTYPES: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # values of the native enum
CODES_OF_WORD: Final = 8  # 4-bit codes in 32 bits


def searched_codes(weights: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of weights [out, in] of a floating type, neighbours in a row side by side: int32
    [out, in / 8], each word with eight codes from -8 to 7, plus 8, the first in its lowest bits; and [out, in / group]
    in the weights' dtype. `group` inputs share a scale: 16, 32, 64, 128 or 256, a divisor of `in`.

    A code is the weight / its scale, rounded to even. Of 26 ways to code a group, the one with the least squared error
    is taken with the scale that is best for its codes, which is then rounded to the dtype (`native/search_codes.cpp`).
    Raises `NotFiniteError`.
    """
    outputs, inputs = weights.shape
    assert weights.stride(1) == 1, "inputs of an output are neighbours"
    assert not inputs % group, "a group has all its inputs"
    words = torch.empty(outputs, inputs // CODES_OF_WORD, dtype=torch.int32)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float32)
    function, dtype = load_library().native_search_codes, DTYPES[weights.dtype]
    step = max(1, AT_ONCE // inputs)
    are_odd: list[int] = []

    def search(first: int) -> None:
        own, found, of_rows = weights[first : first + step], words[first : first + step], scales[first : first + step]
        sizes = *own.shape, own.stride(0), group
        if function(own.data_ptr(), dtype, *sizes, found.data_ptr(), of_rows.data_ptr()):
            are_odd.append(first)

    for_all(search, range(0, outputs, step))
    if are_odd:
        refuse(tuple(weights.shape), weights.dtype)
    return words, scales.to(weights.dtype)


def eight_bit_codes(weights: Tensor, dtype: torch.dtype, columns: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes [out, columns] in a dtype, int8 or float8_e4m3fn, of a range of columns, and scales [out, 1] in the
    weights' dtype.

    A scale is the largest magnitude of a whole output / that of codes, rounded to the weights' dtype, or one where that
    is zero. A code is the weight / scale, rounded to even. Raises `NotFiniteError`.
    """
    outputs, inputs = weights.shape
    assert weights.stride(1) == 1, "inputs of an output are neighbours"
    codes = torch.empty(outputs, columns[1] - columns[0], dtype=dtype)
    scales = torch.empty(outputs, 1, dtype=torch.float32)
    function, number, step = load_library().native_eight_bit_codes, DTYPES[weights.dtype], max(1, AT_ONCE // inputs)
    are_odd: list[int] = []

    def choose(first: int) -> None:
        own, found, of_rows = weights[first : first + step], codes[first : first + step], scales[first : first + step]
        sizes = *own.shape, own.stride(0), *columns, int(dtype is not torch.int8)
        if function(own.data_ptr(), number, *sizes, found.data_ptr(), of_rows.data_ptr()):
            are_odd.append(first)

    for_all(choose, range(0, outputs, step))
    if are_odd:
        refuse(tuple(weights.shape), weights.dtype)
    return codes, scales.to(weights.dtype)


def put_numbers(of: BytesAndScales, out: Tensor, places: NDArray[np.int64]) -> None:
    """Writes the numbers of some rows to the rows `places` of `out` [., columns], of a dtype of `DTYPES`."""
    codes, ends = of.codes, of.ends
    assert codes.stride(1) == 1 == out.stride(1), "numbers of a row are neighbours"
    assert int(ends[-1]) == codes.shape[1] == out.shape[1], "runs are those of the columns"
    assert all(grid.is_contiguous() for grid in (of.zeros, of.scales)), "rows of scales follow each other"
    assert of.scales.shape == of.zeros.shape == (len(codes), len(ends)), "a run has its scales"
    values = torch.arange(256, dtype=torch.uint8).view(codes.dtype).float()
    rows = (out.data_ptr() + places * out.stride(0) * out.itemsize).astype(np.uint64)
    of_runs = ends.ctypes.data, of.zeros.data_ptr(), of.scales.data_ptr(), values.data_ptr()
    sizes = len(codes), codes.stride(0), len(ends)
    load_library().native_numbers(codes.data_ptr(), *sizes, *of_runs, DTYPES[out.dtype], rows.ctypes.data)
