"""Numbers of a tile of a quantized weight, made in registers: bit for bit the dequantized weight.

Codes become numbers of a 16-bit type that hold them exactly; the difference to a zero point is exact too. A scale of
that type gives a product that is rounded once; any other scale is multiplied in float32, where such products are what
dequantizing computes, and then rounded. `worker/executors/coded.py` states how codes lie.
"""

import triton
import triton.language as tl

NUMBERS = tl.constexpr(0)
"""Weights that are no codes."""
FOUR_BITS = tl.constexpr(1)
EIGHT_BITS = tl.constexpr(2)
E4M3 = tl.constexpr(3)

ZERO_POINTS = tl.constexpr(1)
MINIMA = tl.constexpr(2)

BY_TABLE = tl.constexpr(1)
"""GROUP of weights whose inputs name their groups."""


@triton.jit
def _pair(words, HALF: tl.constexpr):
    """The numbers whose bits are the low and the high half of each word."""
    low = (words & 0xFFFF).to(tl.int16).to(HALF, bitcast=True)
    return tl.join(low, (words >> 16).to(tl.int16).to(HALF, bitcast=True))


@triton.jit
def _four_bits(words, HALF: tl.constexpr):
    """[rows, words] -> [rows, 8 words]: 128, or of float16 1,024, plus each code."""
    BASE: tl.constexpr = 0x64006400 if tl.float16 == HALF else 0x43004300
    MASK: tl.constexpr = 0x000F000F
    first, second = _pair((words & MASK) | BASE, HALF), _pair(((words >> 4) & MASK) | BASE, HALF)
    third, fourth = _pair(((words >> 8) & MASK) | BASE, HALF), _pair(((words >> 12) & MASK) | BASE, HALF)
    places = tl.join(tl.join(first, third), tl.join(second, fourth))
    places = tl.reshape(places, (words.shape[0], words.shape[1] // 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(places, (0, 1, 4, 5, 2, 3)), (words.shape[0], 8 * words.shape[1]))


@triton.jit
def _whole(codes):
    """Whole numbers below 2^23, float32: by way of 2^23 plus them."""
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _floating(codes, CODE: tl.constexpr):
    """The numbers, float32, of bits of E4M3 that are no NaN, or of E5M2."""
    if CODE == E4M3:  # moved to those of a float32, they are 2^-120 of the number, denormals too
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
        return bits.to(tl.float32, bitcast=True) * 1.329227995784915873e36
    else:
        return (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def coded_tile(
    codes,
    scales,  # [outputs, num_groups]
    offsets,  # likewise
    groups,  # [inputs], int32
    outputs,
    is_output,
    first,  # of the inputs
    num_left,  # inputs from there on that are of use
    num_inputs,
    num_groups,
    group_inputs,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    CODE: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of the tile that share a scale
    EVEN: tl.constexpr,  # all inputs are of use
    DTYPE: tl.constexpr,
):
    """[OUTPUTS, INPUTS] of DTYPE. Inputs that are of no use are finite numbers, where scales are."""
    HALF: tl.constexpr = tl.float16 if tl.float16 == DTYPE else tl.bfloat16
    COUNT: tl.constexpr = INPUTS // GROUP
    rows = outputs[:, None].to(tl.int64)
    mask = is_output[:, None]
    each = tl.arange(0, COUNT)
    if GROUP == BY_TABLE:
        group = tl.load(groups + first + each, mask=each < num_left, other=0)
    else:
        group = first // group_inputs + each
    places = rows * num_groups + group[None, :]
    has_group = mask if EVEN else mask & (group < num_groups)[None, :]
    scale = tl.load(scales + places, mask=has_group, other=0.0)
    if CODE == FOUR_BITS:
        lanes = tl.arange(0, INPUTS // 8)
        words = codes + rows * (num_inputs // 8) + first // 8 + lanes[None, :]
        read = tl.load(words, mask=mask if EVEN else mask & (lanes * 8 < num_left)[None, :], other=0)
        number = tl.reshape(_four_bits(read, HALF), (OUTPUTS, COUNT, GROUP))
        BASE: tl.constexpr = 1024.0 if tl.float16 == HALF else 128.0
        if OFFSET == ZERO_POINTS:
            zero = (_whole(tl.load(offsets + places, mask=has_group, other=0)) + BASE).to(HALF)
            number = number - zero[:, :, None]
        else:
            number = number - tl.full((1, 1, 1), BASE if OFFSET == MINIMA else BASE + 8.0, tl.float32).to(HALF)
    else:
        inputs = tl.arange(0, INPUTS)
        read = codes + rows * num_inputs + first + inputs[None, :]
        read = tl.load(read, mask=mask if EVEN else mask & (inputs < num_left)[None, :], other=0)
        read = tl.reshape(read, (OUTPUTS, COUNT, GROUP))
        if CODE != EIGHT_BITS:
            number = _floating(read, CODE).to(HALF)
        elif OFFSET == ZERO_POINTS:
            zero = _whole(tl.load(offsets + places, mask=has_group, other=0))
            number = (_whole(read) - zero[:, :, None]).to(HALF)
        else:
            number = (_whole(read) - (0.0 if OFFSET == MINIMA else 128.0)).to(HALF)
    if OFFSET != MINIMA and scale.dtype == DTYPE and DTYPE == HALF:
        number = number * scale[:, :, None]
    else:
        number = number.to(tl.float32) * scale.to(tl.float32)[:, :, None]
        if OFFSET == MINIMA:
            minimum = tl.load(offsets + places, mask=has_group, other=0.0).to(tl.float32)
            number = number + minimum[:, :, None]
    return tl.reshape(number.to(DTYPE), (OUTPUTS, INPUTS))
