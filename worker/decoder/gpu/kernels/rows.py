"""Rows of logits as the kernels of draws read them: in chunks, in blocks of 64, the k-th best of them.

What may not live here: which token is drawn (`draws.py`), what is told of it (`reports.py`).
"""

import triton
import triton.language as tl

from holdfast.worker.decoder.gpu.kernels.exact import flushed, ordered

CHUNK = tl.constexpr(1024)
"""Tokens that a program takes at a time."""
BLOCK = tl.constexpr(64)
CHUNK_BLOCKS = tl.constexpr(16)
NO_PLACE = tl.constexpr(2147483647)

RECORD = tl.constexpr(12)
"""Words of a row's record, as `worker/decoder/draw_records.py` packs it; and the places of its fields."""
SEED = tl.constexpr(0)
MIN_P = tl.constexpr(2)
TOP_P = tl.constexpr(4)
INVERSE_TEMPERATURE = tl.constexpr(6)
POSITION = tl.constexpr(7)
TOP_K = tl.constexpr(8)
EDITS = tl.constexpr(9)
NUM_LOGPROBS = tl.constexpr(10)
GIVEN = tl.constexpr(11)

ABSENT = tl.constexpr(-2)
"""In place of a given token: the row is padding, of which nothing else is read."""


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
    """`ordered` of the k-th largest of some bests [BLOCKS], int64; of -inf where there are not so many."""
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
    """Writes the blocks whose best one reaches a bound, in order. Returns how many they are."""
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
