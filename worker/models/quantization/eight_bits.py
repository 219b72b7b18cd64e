"""Codes of 8 bits for weights [out, in]: whole numbers or fp8, with one scale for each output."""

from typing import Final

import torch
from torch import Tensor

from holdfast.worker.executors.stored_matrix import AT_ONCE, for_all

_MOST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest magnitude of a code."""


def eight_bit_codes(weights: Tensor, dtype: torch.dtype, columns: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes [out, columns] in a dtype, int8 or float8_e4m3fn, of a range of columns, and scales [out, 1] in the
    weights' dtype.

    A scale is the largest magnitude of a whole output / that of codes, rounded to the weights' dtype, or one where that
    is zero. A code is the weight / scale, rounded to even. Raises `ValueError` where a weight is not finite.
    """
    outputs, inputs = weights.shape
    first, last = columns
    most = _MOST[dtype]
    codes = torch.empty(outputs, last - first, dtype=dtype)
    scales = torch.empty(outputs, 1, dtype=weights.dtype)
    step = max(1, AT_ONCE // inputs)

    def choose(row: int) -> None:
        numbers = weights[row : row + step].float()
        largest = torch.maximum(numbers.amax(1, keepdim=True), -numbers.amin(1, keepdim=True))
        scale = (largest / most).to(weights.dtype)
        scale[scale == 0] = 1.0
        scales[row : row + step] = scale
        steps = numbers[:, first:last] / scale.float()
        steps = steps.round_() if dtype is torch.int8 else steps
        codes[row : row + step] = steps.clamp_(-most, most).to(dtype)

    for_all(choose, range(0, outputs, step))
    if not bool(scales.isfinite().all()):
        raise ValueError("a weight is not finite")
    return codes, scales
