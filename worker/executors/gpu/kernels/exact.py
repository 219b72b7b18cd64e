"""Functions of Triton kernels with the native sampler's bits: exponentials, logarithms, noise, ordered sums.

Only IEEE operations, explicit fused multiply-adds and sums of a written order live here; denormals count as zero, as
there (`worker/executors/cpu/native/functions.h`, `words.h`). Results of such operations do not.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.44269504)
_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32
# 1.5 * 2^23: adding it rounds off a number's fraction, to the nearest, ties to even
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def flushed(x):
    """float32 without denormals."""
    return tl.where(tl.abs(x) < _TINY, 0.0, x)


@triton.jit
def exp2_of(y):
    """2^y for float32 y <= 0; 0 where that is no normal number."""
    y = tl.maximum(y, -128.0)
    n = (y + _ROUNDER) - _ROUNDER
    f = y - n
    p = tl.full(y.shape, 1.5403530e-4, tl.float32)
    p = tl.fma(p, f, tl.full(y.shape, 1.3333558e-3, tl.float32))
    p = tl.fma(p, f, tl.full(y.shape, 9.6181291e-3, tl.float32))
    p = tl.fma(p, f, tl.full(y.shape, 5.5504109e-2, tl.float32))
    p = tl.fma(p, f, tl.full(y.shape, 2.4022651e-1, tl.float32))
    p = tl.fma(p, f, tl.full(y.shape, 6.9314718e-1, tl.float32))
    p = tl.fma(p, f, tl.full(y.shape, 1.0, tl.float32))
    is_normal = (n > -126.0) | ((n == -126.0) & (p >= 1.0))
    power = ((tl.maximum(n, -126.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_normal, p * power, 0.0)


@triton.jit
def log_of(x):
    """The natural logarithm of a normal float64 above 0."""
    bits = x.to(tl.int64, bitcast=True)
    k = (bits >> 52) - 1023
    bits = bits & 0xFFFFFFFFFFFFF
    up = (bits + 0x95F6400000000) & 0x10000000000000  # from the square root of 2 on: half of it
    bits = bits | (up ^ 0x3FF0000000000000)
    k = (k + (up >> 52)).to(tl.float64)
    f = bits.to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    even = w * (w * (w * 1.531383769920937332e-01 + 2.222219843214978396e-01) + 3.999999999940941908e-01)
    odd = w * (w * (w * 1.479819860510658591e-01 + 1.818357216161805012e-01) + 2.857142874366239149e-01)
    odd = z * (odd + 6.666666666666735130e-01)
    half = f * 0.5 * f
    r = s * (half + (even + odd))
    return k * 6.93147180369123816490e-01 - ((half - (r + k * 1.90821492927058770002e-10)) - f)


@triton.jit
def mixed(bits):
    """Murmur3's finalizer of uint32."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def noise_key(seed_low, seed_high, position):
    """uint32 from the halves of a seed and an output position, int32 each."""
    key = mixed(seed_low.to(tl.uint32, bitcast=True) ^ (position.to(tl.uint32, bitcast=True) * 0x9E3779B1))
    return mixed(key ^ seed_high.to(tl.uint32, bitcast=True))


@triton.jit
def noise(key, tokens):
    """32 random bits of each token."""
    return mixed(key + tokens.to(tl.uint32) * 0xC2B2AE3D)


@triton.jit
def score(bits, scaled):
    """Gumbel-max score of a token, float64, from its noise and its logit over the temperature: the largest is drawn."""
    u = (bits.to(tl.float64) + 0.5) * 2.3283064365386962890625e-10
    return scaled.to(tl.float64) - log_of(-log_of(1.0 - u))


@triton.jit
def score_bound(bits, scaled):
    """No less than the score but for some roundings, float32: -log u, read off the exponent of u."""
    upper = (bits >> 8).to(tl.int32).to(tl.float32)
    log2_u = upper.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07 - 151.0
    return scaled - log2_u * 0.69314718


@triton.jit
def lowered(value):
    """A little less than a score, float32, to compare with bounds."""
    return (value - 1e-4 - tl.abs(value) * 1e-6).to(tl.float32)


@triton.jit
def raised(x):
    """The smallest float32 that is no smaller than a float64, a denormal taken for 0."""
    f = flushed(x.to(tl.float32))
    bits = f.to(tl.int32, bitcast=True)
    after = tl.where(f > 0, bits + 1, tl.where(f < 0, bits - 1, 0)).to(tl.float32, bitcast=True)
    return flushed(tl.where(f.to(tl.float64) < x, after, f))


@triton.jit
def ordered(x):
    """int32 in the order of float32 without denormals and NaN; equal numbers have equal ones."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """The float32 that `ordered` made an int32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def lane_sums(x, BLOCKS: tl.constexpr):
    """[BLOCKS, 64] -> [BLOCKS, 16]: four times 16 lanes, the pairs first."""
    pairs = tl.sum(tl.reshape(x, (BLOCKS, 2, 2, 16)), 2)
    return tl.sum(pairs, 1)


@triton.jit
def sum_of_lanes(x, ROWS: tl.constexpr):
    """[ROWS, 16] -> [ROWS]: lanes 8 apart first, then 4, 2, 1."""
    x = tl.sum(tl.reshape(x, (ROWS, 2, 8)), 1)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 4)), 1)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 2)), 1)
    return tl.sum(x, 1)


@triton.jit
def double_at(words):
    """The float64 that two int32 in memory are, the lower half first."""
    low = tl.load(words).to(tl.uint32, bitcast=True).to(tl.int64)
    high = tl.load(words + 1).to(tl.int64)
    return ((high << 32) | low).to(tl.float64, bitcast=True)


@triton.jit
def float_at(words):
    """The float32 that an int32 in memory is."""
    return tl.load(words).to(tl.float32, bitcast=True)
