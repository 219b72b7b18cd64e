"""Functions of Triton kernels that store a row of a head in 8 bits and read it back (`worker/attention/fp8.py`).

Integers, comparisons and products with powers of two, which round nothing or as IEEE says: the same bits with hardware
for fp8, without it, and under the interpreter. What may not live here: where rows lie.
"""

import triton
import triton.language as tl

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_TO_NEXT_POWER = tl.constexpr(0x17FFFF)
"""Of bits of float32: what rounds to more than 1.75, the largest fraction of e4m3, gets the next exponent."""
_SMALLEST_NORMAL = tl.constexpr(0.015625)
_DENORMALS = tl.constexpr(16384.0)  # what is added to it keeps multiples of 2^-9, to the nearest, ties to even
_BROKEN = tl.constexpr(255)


@triton.jit
def e4m3_of(x):
    """float32 -> codes, int32: to nearest, ties to even; what is too large, infinity too, becomes the largest."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & _MAGNITUDE
    magnitude = size.to(tl.float32, bitcast=True)
    small = (magnitude + _DENORMALS).to(tl.int32, bitcast=True) & 0xFF
    rounded = tl.minimum(size, _INFINITY) + 0x7FFFF + ((size >> 20) & 1)
    large = tl.minimum((rounded >> 20) - (120 << 3), 0x7E)
    large = tl.where(size > _INFINITY, 0x7F, large)
    return tl.where(magnitude < _SMALLEST_NORMAL, small, large) | ((bits >> 24) & 0x80)


@triton.jit
def encoded(x, mask, DTYPE: tl.constexpr):
    """A row of float32 that DTYPE holds exactly -> codes and the row's scale, int32 both."""
    bits = tl.where(mask, x.to(tl.int32, bitcast=True) & _MAGNITUDE, 0)
    largest = tl.max(bits, 0)
    power = ((largest + _TO_NEXT_POWER) >> 23) - 127 - 8
    most: tl.constexpr = 7 if tl.float16 == DTYPE else 119
    power = tl.minimum(tl.maximum(power, -127), most)
    scaled = x * ((120 - power) << 23).to(tl.float32, bitcast=True) * 128.0
    is_broken = largest >= _INFINITY
    return tl.where(is_broken, 0, e4m3_of(scaled)), tl.where(is_broken, _BROKEN, power + 127)


@triton.jit
def factor_of(scales):
    """What codes are multiplied with, float32, from the bytes of their scales."""
    scales = scales.to(tl.int32)
    factor = ((scales + 7) << 23).to(tl.float32, bitcast=True)
    return tl.where(scales == _BROKEN, float("nan"), factor)


@triton.jit
def decoded(codes, factor):
    """Codes, uint8, times their scales: float32. Exact.

    A code's bits, moved to those of a float32, are 2^-120 of its value, its denormals too.
    """
    bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
    return bits.to(tl.float32, bitcast=True) * 1.0384593717069655e34 * factor
