"""Triton kernel between the linear of queries, keys and values and attention: norms of heads, rotation, the KV write.

One program takes one head of one token.
"""

import triton
import triton.language as tl

from holdfast.worker.executors.gpu.kernels.layers import LAYER_NORM, NO_NORM, RMS_NORM  # noqa: F401


@triton.jit
def write_pages(
    key,  # [KV_HEADS, rows, KEY_DIM] with any strides but of the last dimension
    value,  # [KV_HEADS, rows, VALUE_DIM], likewise
    keys,  # [slots, KV_HEADS, KEY_DIM]
    values,  # [slots, KV_HEADS, VALUE_DIM]
    slots,  # [rows], int32; below 0: padding
    key_head_stride,
    key_row_stride,
    value_head_stride,
    value_row_stride,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIMS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
):
    """Grid: (rows, KV_HEADS)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        dims = tl.arange(0, KEY_DIMS)
        mask = dims < KEY_DIM
        k = tl.load(key + head * key_head_stride + row * key_row_stride + dims, mask=mask)
        tl.store(keys + (slot * KV_HEADS + head) * KEY_DIM + dims, k, mask=mask)
        dims = tl.arange(0, VALUE_DIMS)
        mask = dims < VALUE_DIM
        v = tl.load(value + head * value_head_stride + row * value_row_stride + dims, mask=mask)
        tl.store(values + (slot * KV_HEADS + head) * VALUE_DIM + dims, v, mask=mask)


_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_TO_NEXT_POWER = tl.constexpr(0x17FFFF)
"""Threshold in bits of float32: a fraction above 1.75, the largest of e4m3, rounds to the next exponent."""
_SMALLEST_NORMAL = tl.constexpr(0.015625)
_DENORMALS = tl.constexpr(16384.0)  # adding it rounds to multiples of 2^-9, to the nearest, ties to even
_BROKEN = tl.constexpr(255)


@triton.jit
def e4m3_of(x):
    """float32 -> codes, int32: to nearest, ties to even; a value that is too large, including infinity, becomes the
    largest.
    """
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
    """Factor of codes, float32, from the bytes of their scales."""
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


@triton.jit
def _normed(x, twin, dims, twins, mask, weight, bias, length, eps, KIND: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A head and, in the same order, the dimensions that its own turn with; both normed."""
    if KIND == LAYER_NORM:
        mean = tl.sum(x, 0) / length
        x, twin = tl.where(mask, x - mean, 0.0), tl.where(mask, twin - mean, 0.0)
    if KIND != NO_NORM:
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / length + eps)
        x = x * scale * tl.load(weight + dims, mask=mask, other=0.0)
        twin = twin * scale * tl.load(weight + twins, mask=mask, other=0.0)
        if HAS_BIAS:
            x += tl.load(bias + dims, mask=mask, other=0.0)
            twin += tl.load(bias + twins, mask=mask, other=0.0)
    return x, twin


@triton.jit
def _twins(dims, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Partner in the rotation of each dimension, the number of their pair, and whether it is the pair's first."""
    if INTERLEAVED:
        return tl.where(dims < 2 * PAIRS, dims ^ 1, dims), dims // 2, dims % 2 == 0
    else:
        is_first = dims < PAIRS
        twins = tl.where(is_first, dims + PAIRS, dims - PAIRS)
        return tl.where(dims < 2 * PAIRS, twins, dims), tl.where(is_first, dims, dims - PAIRS), is_first


@triton.jit
def _turned(x, twin, is_first, turns, table, PAIRS: tl.constexpr):
    """A head, turned by the angles whose cosines lie at `table`, and their sines behind them."""
    cos = tl.load(table, mask=turns, other=1.0)
    sin = tl.load(table + PAIRS, mask=turns, other=0.0)
    return x * cos + tl.where(is_first, -twin, twin) * sin


@triton.jit
def _kept(
    x,
    mask,
    dims,
    slot,
    kv_head,
    pool,
    scales,
    DTYPE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    IN_FP8: tl.constexpr,
):
    """Writes a head's key or value to its slot, as the model's dtype rounds it; in fp8, rounded again."""
    place = pool + (slot * KV_HEADS + kv_head) * HEAD_DIM + dims
    if IN_FP8:
        codes, scale = encoded(x.to(DTYPE).to(tl.float32), mask, DTYPE)
        tl.store(place, codes.to(tl.uint8), mask=mask)
        tl.store(scales + (slot // SLOTS * KV_HEADS + kv_head) * SLOTS + slot % SLOTS, scale.to(tl.uint8))
    else:
        tl.store(place, x.to(DTYPE), mask=mask)


@triton.jit
def split_heads(
    qkv,  # [rows, (HEADS + 2 KV_HEADS) * HEAD_DIM], float32
    positions,  # [rows], int32
    slots,  # [rows], int32: block * block size + offset; -1: the row is padding
    angles,  # [positions, 2, PAIRS], float32: cosines, sines
    query_weight,  # [HEAD_DIM], or [HEADS, HEAD_DIM] with a stride; float32
    query_bias,
    key_weight,
    key_bias,
    queries,  # [rows, HEADS, HEAD_DIM]
    keys,  # [slots, KV_HEADS, HEAD_DIM], uint8 in fp8
    values,
    key_scales,  # in fp8: [blocks, KV_HEADS, SLOTS], uint8
    value_scales,
    query_eps,
    key_eps,
    weight_stride,  # between the weights of neighbouring heads, or 0
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,  # 0: nothing turns
    INTERLEAVED: tl.constexpr,
    QUERY_KIND: tl.constexpr,
    HAS_QUERY_BIAS: tl.constexpr,
    KEY_KIND: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    SLOTS: tl.constexpr,  # of a block of the cache; where there are scales
    IN_FP8: tl.constexpr,
):
    """Grid: (rows, HEADS + 2 KV_HEADS)."""
    DTYPE: tl.constexpr = queries.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    mask = dims < HEAD_DIM
    start = qkv + row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
    x = tl.load(start + dims, mask=mask, other=0.0)
    if head >= HEADS + KV_HEADS:
        if slot >= 0:
            own = head - HEADS - KV_HEADS
            _kept(x, mask, dims, slot, own, values, value_scales, DTYPE, KV_HEADS, HEAD_DIM, SLOTS, IN_FP8)
    else:
        twins, pairs, is_first = _twins(dims, PAIRS, INTERLEAVED)
        twin = tl.load(start + twins, mask=mask, other=0.0)
        if head < HEADS:
            own = head * weight_stride
            x, twin = _normed(
                x,
                twin,
                dims,
                twins,
                mask,
                query_weight + own,
                query_bias + own,
                HEAD_DIM,
                query_eps,
                QUERY_KIND,
                HAS_QUERY_BIAS,
            )
        else:
            own = (head - HEADS) * weight_stride
            x, twin = _normed(
                x, twin, dims, twins, mask, key_weight + own, key_bias + own, HEAD_DIM, key_eps, KEY_KIND, HAS_KEY_BIAS
            )
        if PAIRS > 0:
            table = angles + tl.load(positions + row).to(tl.int64) * (2 * PAIRS) + pairs
            x = _turned(x, twin, is_first, dims < 2 * PAIRS, table, PAIRS)
        if head < HEADS:
            place = (row * HEADS + head) * HEAD_DIM
            tl.store(queries + place + dims, x.to(DTYPE), mask=mask)
        else:
            if slot >= 0:
                own = head - HEADS
                _kept(x, mask, dims, slot, own, keys, key_scales, DTYPE, KV_HEADS, HEAD_DIM, SLOTS, IN_FP8)
