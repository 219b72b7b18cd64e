"""Triton kernels that report on tokens: log-probability, rank, best tokens of a row, with the native sampler's bits.

The logits are raw: before any edit.
"""

import triton
import triton.language as tl

from holdfast.worker.draws import DRAW_TYPES, words_of
from holdfast.worker.executors.gpu.kernels.exact import (
    LOG2_E,
    exp2_of,
    flushed,
    lane_sums,
    log_of,
    ordered,
    sum_of_lanes,
    unordered,
)

CHUNK = tl.constexpr(1024)
"""Tokens that a program takes at a time."""
BLOCK = tl.constexpr(64)
CHUNK_BLOCKS = tl.constexpr(16)
NO_PLACE = tl.constexpr(2147483647)

WORDS = words_of(DRAW_TYPES)
RECORD = tl.constexpr(-(-(1 + WORDS["token"]) // 2) * 2)
"""Words of a draw's record, padded to whole 64 bits; and the places of its fields."""
EDITS = tl.constexpr(WORDS["edits"])
NUM_LOGPROBS = tl.constexpr(WORDS["num_logprobs"])
GIVEN = tl.constexpr(WORDS["token"])

ABSENT = tl.constexpr(-2)
"""Value in place of a given token: the row is padding, and its other values are not read."""


@triton.jit
def kept_by(x, tokens, mask, keeps, MASKED: tl.constexpr):
    """Logits, -inf where a row's mask has no bit for the token. There is none where `keeps` is -1."""
    if MASKED:
        last = tl.where(keeps >= 0, NO_PLACE, -1)
        words = tl.load(mask + (tokens >> 5), mask=(x > -float("inf")) & (tokens <= last), other=-1)
        x = tl.where(((words >> (tokens & 31)) & 1) > 0, x, -float("inf"))
    return x


@triton.jit
def chunk_of(row, chunk, vocab, mask, keeps, MASKED: tl.constexpr):
    """Tokens [CHUNK] and their logits, -inf beyond the vocabulary. `row` points to its first logit."""
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = flushed(tl.load(row + tokens, mask=tokens < vocab, other=-float("inf")))
    return tokens, kept_by(x, tokens, mask, keeps, MASKED)


@triton.jit
def blocks_of(row, blocks, vocab, mask, keeps, NUMBER: tl.constexpr, MASKED: tl.constexpr):
    """Tokens [NUMBER, 64] of some blocks and their logits; -inf for those of block -1."""
    tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_there = (tokens >= 0) & (tokens < vocab)
    x = flushed(tl.load(row + tokens, mask=is_there, other=-float("inf")))
    return tokens, kept_by(x, tokens, mask, keeps, MASKED)


@triton.jit
def first_of_block(row, block, value, vocab, mask, keeps, MASKED: tl.constexpr):
    """The first token of a block whose logit has this value."""
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = flushed(tl.load(row + tokens, mask=tokens < vocab, other=-float("inf")))
    return tl.min(tl.where(kept_by(x, tokens, mask, keeps, MASKED) == value, tokens, NO_PLACE), 0)


@triton.jit
def logit_of(row, token, mask, keeps, MASKED: tl.constexpr):
    """The logit of one token."""
    return kept_by(flushed(tl.load(row + token)), token, mask, keeps, MASKED)


@triton.jit
def bound_of_best(bests, k):
    """`ordered` of the k-th largest of some bests [BLOCKS], int64; of -inf if there are fewer."""
    keys = ordered(bests).to(tl.int64)
    low = tl.cast(-2139095041, tl.int64)
    high = tl.maximum(tl.max(keys, 0), low)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        reaches = tl.sum((keys >= middle).to(tl.int32), 0) >= k
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle - 1)
    return low


@triton.jit
def list_blocks(bests, bound, num_blocks, listed, BLOCKS: tl.constexpr):
    """Writes the blocks whose best one reaches a bound, in order. Returns their number."""
    places = tl.arange(0, BLOCKS)
    reaches = ((ordered(bests).to(tl.int64) >= bound) & (places < num_blocks)).to(tl.int32)
    tl.store(listed + tl.cumsum(reaches, 0) - 1, places, mask=reaches > 0)
    tl.debug_barrier()
    return tl.sum(reaches, 0)


@triton.jit
def listed_blocks(listed, start, count):
    """CHUNK_BLOCKS of the listed blocks from `start` on, -1 behind the last."""
    places = start + tl.arange(0, CHUNK_BLOCKS)
    return tl.load(listed + places, mask=places < count, other=-1)


@triton.jit
def kth_best(row, bests, k, vocab, num_blocks, listed, mask, keeps, BLOCKS: tl.constexpr, MASKED: tl.constexpr):
    """`ordered` of the k-th best logit of a row, int64. `bests` [BLOCKS]: of its blocks; `listed`: room for all."""
    low = bound_of_best(bests, k)
    high = tl.maximum(tl.max(ordered(bests).to(tl.int64), 0), low)
    count = list_blocks(bests, low, num_blocks, listed, BLOCKS)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        reach = tl.zeros((CHUNK_BLOCKS, BLOCK), tl.int32)
        for start in range(0, count, CHUNK_BLOCKS):
            some = listed_blocks(listed, start, count)
            _, x = blocks_of(row, some, vocab, mask, keeps, CHUNK_BLOCKS, MASKED)
            reach += (ordered(x).to(tl.int64) >= middle).to(tl.int32)
        reaches = tl.sum(tl.sum(reach, 1), 0) >= k
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle - 1)
    return low


HEAD = tl.constexpr(4)
"""Words before the best tokens of a row: its token, rank, log-probability, and how many best tokens follow."""
_MIN_EXPONENT = tl.constexpr(-89.0)  # below it an exponential is 0


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
    """Best logit of each block, and the sum of the exponentials of all less the best. Grid: (rows, chunks)."""
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
        counts = best - largest > _MIN_EXPONENT
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
    report,  # [rows, HEAD + 2 most], int32: HEAD words, the best tokens, their log-probabilities
    stride,
    vocab,
    num_chunks,
    most,
    BLOCKS: tl.constexpr,
):
    """Reports about a row's token, if requested. Grid: (rows,)."""
    program = tl.program_id(0).to(tl.int64)
    row, num_blocks = logits + program * stride, num_chunks * CHUNK_BLOCKS
    out, own = report + program * (HEAD + 2 * most), program * num_blocks
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


COLUMNS = tl.constexpr(1024)


@triton.jit
def best_of_blocks(
    logits,  # [rows, stride], float32
    bests,  # [rows, blocks, 3], float32: best logit, sum of exp(logit - best), 1 where all are finite
    places,  # [rows, blocks], int32: column of the best; of equal ones the first
    num_columns,
    stride,
    num_blocks,
):
    """Grid: (rows, blocks of COLUMNS)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    x = tl.load(logits + row * stride + columns, mask=is_column, other=-float("inf"))
    is_fine = (tl.abs(x) < float("inf")) | ~is_column
    x = tl.where((tl.abs(x) < float("inf")) & is_column, x, -float("inf"))
    best = tl.max(x, 0)
    place = tl.min(tl.where(x == best, columns, 2147483647), 0)
    safe = tl.where(best == -float("inf"), 0.0, best)
    out = bests + (row * num_blocks + block) * 3
    tl.store(out, best)
    tl.store(out + 1, tl.sum(tl.exp(x - safe), 0))
    tl.store(out + 2, tl.min(is_fine.to(tl.int32), 0).to(tl.float32))
    tl.store(places + row * num_blocks + block, place)


@triton.jit(do_not_specialize=["num_rows"])
def best_of_rows(
    bests,  # [ranks, rows, blocks, 3], float32
    places,  # [ranks, rows, blocks], int32
    tokens,  # [rows], int32: -1 where not all logits of a row are finite
    logsumexps,  # [rows], float32
    num_rows,
    num_blocks,
    num_ranks,
    rank_columns,  # columns of a rank
):
    """Blocks follow one another in ascending order, so that of equal logits the lowest token wins. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    best = -float("inf")
    token = tl.cast(-1, tl.int32)
    total = 0.0
    fine = 1.0
    for rank in range(num_ranks):
        for block in range(num_blocks):
            at = (rank * tl.cast(num_rows, tl.int64) + row) * num_blocks + block
            other, weight = tl.load(bests + at * 3), tl.load(bests + at * 3 + 1)
            fine = tl.minimum(fine, tl.load(bests + at * 3 + 2))
            top = tl.maximum(best, other)
            safe = tl.where(top == -float("inf"), 0.0, top)
            total = total * tl.exp(best - safe) + weight * tl.exp(other - safe)
            token = tl.where(other > best, tl.load(places + at) + rank * rank_columns, token)
            best = top
    tl.store(tokens + row, tl.where(fine > 0.5, token, -1))
    tl.store(logsumexps + row, best + tl.log(total))
