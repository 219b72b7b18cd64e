"""Codes of 4 bits for weights, chosen by the native library, which searches each group's scale for the least error."""

from typing import Final

import torch
from torch import Tensor

from holdfast.worker.executors.cpu.library import load_library
from holdfast.worker.executors.cpu.packing import DTYPES
from holdfast.worker.executors.stored_matrix import AT_ONCE, for_all

CODES_OF_WORD: Final = 8


def searched_codes(weights: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of weights [out, in] of a floating type, neighbours in a row side by side: int32
    [out, in / 8], each word with eight codes from -8 to 7, plus 8, the first in its lowest bits; and [out, in / group]
    in the weights' dtype. `group` inputs share a scale: 16, 32, 64, 128 or 256, a divisor of `in`.

    A code is the weight / its scale, rounded to even. Of 26 ways to code a group, the one with the least squared error
    is taken with the scale that is best for its codes, which is then rounded to the dtype (`native/quantize.cpp`).
    Raises `ValueError` where a weight is not finite.
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
        raise ValueError("a weight is not finite")
    return words, scales.to(weights.dtype)
