"""Rows of keys and values in 8 bits: codes in e4m3 and, of each row, one power of two in e8m0 (OCP Microscaling).

A row is one token's key or value of one head. Its scale is chosen from its own largest magnitude, so what is stored of
a token depends on that token alone. Here is what the format means, in plain torch: the oracle of the kernels
(`worker/decoder/gpu/kernels/fp8.py`). What may not live here: memory (`kv_cache.py`).
"""

from typing import Final

import torch
from torch import Tensor

LARGEST: Final = 448.0
"""Of e4m3."""

ROUNDS_TO_LARGEST: Final = 464.0
"""What is no larger rounds to `LARGEST`, ties to even."""

BROKEN: Final = 255
"""The scale of a row with NaN or infinity: e8m0's NaN."""

BIAS: Final = 127
"""Of e8m0: a scale's byte is its power of two and this."""

LEAST_POWER: Final = -127


def most_power(dtype: torch.dtype) -> int:
    """The largest power of two of a scale: so that `LARGEST` times it is a number of this dtype."""
    return 7 if dtype == torch.float16 else 119


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., n] of float32, bfloat16 or float16 -> codes [..., n] and scales [...], both uint8.

    The scale is the smallest power of two by which no element of the row exceeds e4m3, within 2^-127 and `most_power`.
    Elements are rounded to nearest, ties to even; those too large even so become the largest. A row with NaN or
    infinity is broken as a whole: then something notices it.
    """
    is_broken = ~x.isfinite().all(-1)
    exact = x.double().masked_fill(is_broken[..., None], 0.0)
    largest = exact.abs().amax(-1)
    fraction, power = torch.frexp(largest / ROUNDS_TO_LARGEST)  # in [0.5, 1): 2^power is the next power of two
    power = (power - (fraction == 0.5).int()).clamp(LEAST_POWER, most_power(x.dtype))
    power = torch.where(largest == 0, LEAST_POWER, power)
    scaled = (exact * _two_to(-power)[..., None]).clamp(-LARGEST, LARGEST)
    codes = scaled.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, torch.where(is_broken, BROKEN, power + BIAS).to(torch.uint8)


def decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What rows are read as. Of rows of this dtype that were encoded, nothing is rounded: where the grid of codes is
    finer than that of the dtype's smallest numbers, an element is one of them itself.
    """
    values = codes.view(torch.float8_e4m3fn).double()
    exact = values * _two_to(scales.int() - BIAS)[..., None]
    return exact.masked_fill((scales == BROKEN)[..., None], torch.nan).to(dtype)


def _two_to(power: Tensor) -> Tensor:
    """float64, exactly: `torch.ldexp` and `exp2` promise less."""
    return ((power.long() + 1023) << 52).view(torch.float64)
