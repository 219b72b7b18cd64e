"""Triton kernels that tell of tokens: log-probability, rank, best tokens of a row, with the native sampler's bits.

The logits are raw: before any edit. What may not live here: draws (`draws.py`).
"""

import triton
import triton.language as tl

from holdfast.worker.decoder.gpu.kernels.exact import (
    LOG2_E,
    exp2_of,
    flushed,
    lane_sums,
    log_of,
    ordered,
    sum_of_lanes,
    unordered,
)
from holdfast.worker.decoder.gpu.kernels.rows import (
    ABSENT,
    BLOCK,
    CHUNK,
    CHUNK_BLOCKS,
    GIVEN,
    NO_PLACE,
    NUM_LOGPROBS,
    RECORD,
    blocks_of,
    bound_of_best,
    chunk_of,
    list_blocks,
    listed_blocks,
)

HEAD = tl.constexpr(4)
"""Words before the best tokens of a row: its token, rank, log-probability, and how many best tokens follow."""
_LEAST_EXPONENT = tl.constexpr(-89.0)  # below it an exponential is 0


@triton.jit
def block_masses(
    logits,  # [rows, stride], float32
    records,  # [rows, RECORD], int32
    bests,  # [rows, chunks * 16], float32
    masses,  # [rows, chunks * 16], float32
    stride,
    vocab,
    num_chunks,
):
    """Of each block the best logit and the exponentials of all less it, summed. Grid: (rows, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record = records + row * RECORD
    if (tl.load(record + NUM_LOGPROBS) >= 0) & (tl.load(record + GIVEN) != ABSENT):
        _, x = chunk_of(logits + row * stride, chunk, vocab, masses, -1, False)
        x = tl.reshape(x, (CHUNK_BLOCKS, BLOCK))
        best = tl.max(x, 1)
        part = exp2_of((x - best[:, None]) * LOG2_E)
        mass = sum_of_lanes(lane_sums(part, CHUNK_BLOCKS), CHUNK_BLOCKS)
        places = (row * num_chunks + chunk) * CHUNK_BLOCKS + tl.arange(0, CHUNK_BLOCKS)
        tl.store(bests + places, best)
        tl.store(masses + places, tl.where(best == -float("inf"), 0.0, mass))


@triton.jit
def log_mass(bests, masses, largest, num_chunks):
    """The logarithm of the sum of all exponentials of a row less the largest."""
    total = tl.zeros((CHUNK_BLOCKS,), tl.float64)
    for chunk in range(num_chunks):
        places = chunk * CHUNK_BLOCKS + tl.arange(0, CHUNK_BLOCKS)
        best = tl.load(bests + places)
        counts = best - largest > _LEAST_EXPONENT
        mass = tl.where(counts, tl.load(masses + places), 0.0)
        gap = tl.where(counts, best, largest) - largest
        total += (exp2_of(gap * LOG2_E) * mass).to(tl.float64)
    return log_of(tl.sum(sum_of_lanes(tl.reshape(total, (1, 16)), 1), 0))


@triton.jit
def logprob_of(x, largest, log_sum):
    return flushed((x.to(tl.float64) - largest.to(tl.float64) - log_sum).to(tl.float32))


@triton.jit
def rank_of(row, token, value, vocab, num_chunks):
    """The rank of a token: equal logits rank by token."""
    better = tl.zeros((CHUNK,), tl.int32)
    for chunk in range(num_chunks):
        tokens, x = chunk_of(row, chunk, vocab, row, -1, False)
        better += ((x > value) | ((x == value) & (tokens < token))).to(tl.int32)
    return tl.sum(better, 0) + 1


@triton.jit
def next_best(row, listed, count, vocab, last):
    """The best token that is worse than `last`, both as 64 bits: the logit `ordered`, then the token turned over."""
    best = tl.cast(-9223372036854775807, tl.int64)
    for start in range(0, count, CHUNK_BLOCKS):
        some = listed_blocks(listed, start, count)
        tokens, x = blocks_of(row, some, vocab, row, -1, CHUNK_BLOCKS, False)
        keys = (ordered(x).to(tl.int64) << 32) | (tokens.to(tl.int64) ^ NO_PLACE)
        keys = tl.where((tokens >= 0) & (tokens < vocab) & (keys < last), keys, best)
        best = tl.max(tl.max(keys, 1), 0)
    return best


@triton.jit
def tell(
    logits,  # [rows, stride], float32
    records,  # [rows, RECORD], int32
    drawn,  # [rows], int32
    bests,  # [rows, chunks * 16], float32
    masses,  # [rows, chunks * 16], float32
    listed,  # [rows, chunks * 16], int32: room
    told,  # [rows, HEAD + 2 most], int32: HEAD words, the best tokens, their log-probabilities
    stride,
    vocab,
    num_chunks,
    most,
    BLOCKS: tl.constexpr,
):
    """What a row says of its token, if it is asked. Grid: (rows,)."""
    program = tl.program_id(0).to(tl.int64)
    row, num_blocks = logits + program * stride, num_chunks * CHUNK_BLOCKS
    out, own = told + program * (HEAD + 2 * most), program * num_blocks
    token, count = tl.load(drawn + program), tl.load(records + program * RECORD + NUM_LOGPROBS)
    tl.store(out, token)
    tl.store(out + 1, 1)
    tl.store(out + 2, 0)
    tl.store(out + 3, 0)
    if (token >= 0) & (count >= 0):
        places = tl.arange(0, BLOCKS)
        best = tl.load(bests + own + places, mask=places < num_blocks, other=-float("inf"))
        largest = tl.max(best, 0)
        log_sum = log_mass(bests + own, masses + own, largest, num_chunks)
        value = flushed(tl.load(row + token))
        count = tl.minimum(count, vocab)
        tl.store(out + 1, rank_of(row, token, value, vocab, num_chunks))
        tl.store(out + 2, logprob_of(value, largest, log_sum).to(tl.int32, bitcast=True))
        tl.store(out + 3, count)
        if count > 0:
            found = list_blocks(best, bound_of_best(best, count), num_blocks, listed + own, BLOCKS)
            last = tl.cast(9223372036854775807, tl.int64)
            for place in range(count):
                last = next_best(row, listed + own, found, vocab, last)
                x = unordered((last >> 32).to(tl.int32))
                tl.store(out + HEAD + place, ((last & 0xFFFFFFFF) ^ NO_PLACE).to(tl.int32))
                said = logprob_of(x, largest, log_sum).to(tl.int32, bitcast=True)
                tl.store(out + HEAD + most + place, said)
