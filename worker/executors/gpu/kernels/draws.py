"""Triton kernels that draw a token from each row of logits: the native sampler's race, to the same tokens.

`worker/executors/cpu/native/sampler.cpp` defines a race, and explains why a race among all tokens also finds the winner
of a nucleus. First all blocks' best logits (`best_of_blocks_of_64`), then the start of each row's race (`start_races`),
then the race among all tokens, cut into chunks (`race_chunks`), then its winner, or for `top_p` the winner within the
nucleus (`settle_races`). A row's token depends neither on other rows nor on the order of programs.
"""

import triton
import triton.language as tl

from holdfast.worker.executors.gpu.kernels.exact import (
    LOG2_E,
    double_at,
    exp2_of,
    float_at,
    flushed,
    lane_sums,
    log_of,
    lowered,
    noise,
    noise_key,
    raised,
    score,
    score_bound,
    sum_of_lanes,
    unordered,
)
from holdfast.worker.executors.gpu.kernels.reports import (
    ABSENT,
    BLOCK,
    CHUNK_BLOCKS,
    GIVEN,
    NO_PLACE,
    RECORD,
    WORDS,
    blocks_of,
    chunk_of,
    first_of_block,
    kept_by,
    kth_best,
    logit_of,
)

SEED = tl.constexpr(WORDS["seed"])
TOP_P = tl.constexpr(WORDS["top_p"])
MIN_P = tl.constexpr(WORDS["min_p"])
TOP_K = tl.constexpr(WORDS["top_k"])
INVERSE_TEMPERATURE = tl.constexpr(WORDS["inverse_temperature"])
POSITION = tl.constexpr(WORDS["position"])

FINITE = tl.constexpr(1)
BROKEN = tl.constexpr(2)
"""Flags of a chunk: it has a finite logit; it has a NaN or infinite logit."""
LANES = tl.constexpr(32)
SPACE_BLOCKS = tl.constexpr(64)
"""Blocks whose masses are added in one go: 16 lanes of all tokens that are left, and 16 of those above the bar."""
UNROLLED = tl.constexpr(16)


@triton.jit
def kept_mask(kept, row, MASKED: tl.constexpr):
    """The mask of a row; -1: none."""
    keeps = tl.cast(-1, tl.int32)
    if MASKED:
        keeps = tl.load(kept + row)
    return keeps


@triton.jit
def best_of_blocks_of_64(
    logits,  # [rows, stride], float32
    records,  # [rows, RECORD], int32
    masks,  # [masks, mask words], int32: a bit for each token that may be drawn, the lowest first
    kept,  # [rows], int32: the mask of a row; -1: none
    bests,  # [rows, chunks * 16], float32
    flaws,  # [rows, chunks], int32: FINITE and BROKEN
    stride,
    vocab,
    num_chunks,
    mask_words,
    MASKED: tl.constexpr,
):
    """The best logit of each block. Grid: (rows, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(records + row * RECORD + GIVEN) != ABSENT:
        keeps = kept_mask(kept, row, MASKED)
        mask = masks + tl.maximum(keeps, 0).to(tl.int64) * mask_words
        tokens, x = chunk_of(logits + row * stride, chunk, vocab, mask, -1, False)
        is_broken = (x != x) | (x == float("inf"))
        flaw = tl.max(tl.where(is_broken, BROKEN, 0), 0) + tl.max(tl.where(tl.abs(x) < float("inf"), FINITE, 0), 0)
        tl.store(flaws + row * num_chunks + chunk, flaw)
        x = kept_by(tl.where(is_broken, -float("inf"), x), tokens, mask, keeps, MASKED)
        x = tl.reshape(x, (CHUNK_BLOCKS, BLOCK))
        places = (row * num_chunks + chunk) * CHUNK_BLOCKS + tl.arange(0, CHUNK_BLOCKS)
        tl.store(bests + places, tl.max(x, 1))


@triton.jit
def start_races(
    logits,  # [rows, stride], float32
    records,  # [rows, RECORD], int32
    masks,  # [masks, mask words], int32: a bit for each token that may be drawn, the lowest first
    kept,  # [rows], int32: the mask of a row; -1: none
    bests,  # [rows, chunks * 16], float32
    flaws,  # [rows, chunks], int32
    listed,  # [rows, chunks * 16], int32: room
    starts,  # [rows, 4], float32: scaled best logit, smallest remaining scaled logit, the score to reach
    firsts,  # [rows], int32: the first of the best tokens; -1 for a row that is broken or absent
    stride,
    vocab,
    num_chunks,
    mask_words,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Start of each row's race: the tokens that min-p and top-k leave, and a score to beat. Grid: (rows,)."""
    program = tl.program_id(0).to(tl.int64)
    row, record = logits + program * stride, records + program * RECORD
    num_blocks = num_chunks * CHUNK_BLOCKS
    keeps = kept_mask(kept, program, MASKED)
    mask = masks + tl.maximum(keeps, 0).to(tl.int64) * mask_words
    places, chunks = tl.arange(0, BLOCKS), tl.arange(0, CHUNKS)
    own = bests + program * num_blocks
    best = tl.load(own + places, mask=places < num_blocks, other=-float("inf"))
    flaw = tl.load(flaws + program * num_chunks + chunks, mask=chunks < num_chunks, other=0)
    is_fine = (tl.load(record + GIVEN) != ABSENT) & (tl.max(flaw & BROKEN, 0) == 0) & (tl.max(flaw & FINITE, 0) > 0)
    largest = tl.max(best, 0)
    first = tl.cast(-1, tl.int32)
    if is_fine:
        block = tl.min(tl.where(best == largest, places, NO_PLACE), 0)
        first = first_of_block(row, block, largest, vocab, mask, keeps, MASKED)
    scale = float_at(record + INVERSE_TEMPERATURE)
    if is_fine & (scale != 0.0):
        top = flushed(largest * scale)
        least = tl.cast(-float("inf"), tl.float32)
        min_p, top_k = double_at(record + MIN_P), tl.load(record + TOP_K)
        if min_p > 0.0:
            least = raised(top.to(tl.float64) + log_of(min_p))
        if (top_k > 0) & (top_k < vocab):
            room = listed + program * num_blocks
            kth = kth_best(row, best, top_k, vocab, num_blocks, room, mask, keeps, BLOCKS, MASKED)
            least = tl.maximum(least, flushed(unordered(kth.to(tl.int32)) * scale))
        key = noise_key(tl.load(record + SEED), tl.load(record + SEED + 1), tl.load(record + POSITION))
        start = starts + program * 4
        tl.store(start, top)
        tl.store(start + 1, least)
        tl.store(start + 2, lowered(score(noise(key, first), top)))
    tl.store(firsts + program, first)


@triton.jit
def best_score(x, tokens, scale, key, least, bar, needed):
    """The best score among some tokens [N] that are left, and the first token that has it; -inf where none reaches
    `needed`.
    """
    scaled = flushed(x * scale)
    bits = noise(key, tokens)
    can_win = (scaled >= least) & (scaled > bar) & (score_bound(bits, scaled) >= needed)
    best = tl.cast(-float("inf"), tl.float64)
    token = tl.cast(NO_PLACE, tl.int32)
    if tl.max(can_win.to(tl.int32), 0) > 0:
        scores = tl.where(can_win, score(bits, scaled), -float("inf"))
        best = tl.max(scores, 0)
        token = tl.min(tl.where(can_win & (scores == best), tokens, NO_PLACE), 0)
    return best, token


@triton.jit
def race_chunks(
    logits,  # [rows, stride], float32
    records,  # [rows, RECORD], int32
    masks,  # [masks, mask words], int32: a bit for each token that may be drawn, the lowest first
    kept,  # [rows], int32: the mask of a row; -1: none
    starts,  # [rows, 4], float32
    firsts,  # [rows], int32
    scores,  # [rows, chunks], float64
    winners,  # [rows, chunks], int32
    stride,
    vocab,
    num_chunks,
    mask_words,
    MASKED: tl.constexpr,
):
    """The winner of each chunk, among the tokens that min-p and top-k leave. Grid: (rows, chunks)."""
    program, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record, start = records + program * RECORD, starts + program * 4
    scale = float_at(record + INVERSE_TEMPERATURE)
    if (scale != 0.0) & (tl.load(firsts + program) >= 0):
        key = noise_key(tl.load(record + SEED), tl.load(record + SEED + 1), tl.load(record + POSITION))
        keeps = kept_mask(kept, program, MASKED)
        mask = masks + tl.maximum(keeps, 0).to(tl.int64) * mask_words
        tokens, x = chunk_of(logits + program * stride, chunk, vocab, mask, keeps, MASKED)
        best, token = best_score(x, tokens, scale, key, tl.load(start + 1), -float("inf"), tl.load(start + 2))
        tl.store(scores + program * num_chunks + chunk, best)
        tl.store(winners + program * num_chunks + chunk, token)


@triton.jit
def race_above(row, scale, key, least, bar, needed, vocab, num_chunks, mask, keeps, MASKED: tl.constexpr):
    """The winner of a whole row among the tokens that are left above a bar."""
    best = tl.cast(-float("inf"), tl.float64)
    token = tl.cast(NO_PLACE, tl.int32)
    for chunk in range(num_chunks):
        tokens, x = chunk_of(row, chunk, vocab, mask, keeps, MASKED)
        other, place = best_score(x, tokens, scale, key, least, bar, needed)
        token = tl.where(other > best, place, token)  # of equal ones the first
        best = tl.maximum(best, other)
        needed = tl.maximum(needed, lowered(best))
    return token


@triton.jit
def masses(row, scale, top, least, bar, vocab, num_blocks, space, mask, keeps, MASKED: tl.constexpr):
    """The sums of the exponentials of scaled logits less the largest: of all remaining tokens, and of the tokens above
    a bar.

    Sums of 16 lanes in float64, block after block. `space` has room for SPACE_BLOCKS * LANES float32.
    """
    lanes = tl.arange(0, LANES)
    room = tl.arange(0, SPACE_BLOCKS)[:, None] * LANES + tl.arange(0, 16)[None, :]
    total = tl.zeros((LANES,), tl.float64)
    for first in range(0, num_blocks, SPACE_BLOCKS):
        some = first + tl.arange(0, SPACE_BLOCKS)
        _, x = blocks_of(row, some, vocab, mask, keeps, SPACE_BLOCKS, MASKED)
        scaled = flushed(x * scale)
        part = exp2_of((scaled - top) * LOG2_E)
        tl.store(space + room, lane_sums(tl.where(scaled >= least, part, 0.0), SPACE_BLOCKS))
        tl.store(space + room + 16, lane_sums(tl.where(scaled > bar, part, 0.0), SPACE_BLOCKS))
        tl.debug_barrier()
        for block in range(0, SPACE_BLOCKS, UNROLLED):
            for i in tl.static_range(UNROLLED):
                total += tl.load(space + (block + i) * LANES + lanes).to(tl.float64)
        tl.debug_barrier()
    both = sum_of_lanes(tl.reshape(total, (2, 16)), 2)
    is_first = tl.arange(0, 2) == 0
    return tl.sum(tl.where(is_first, both, 0.0), 0), tl.sum(tl.where(is_first, 0.0, both), 0)


@triton.jit
def settle_races(
    logits,  # [rows, stride], float32
    records,  # [rows, RECORD], int32
    masks,  # [masks, mask words], int32: a bit for each token that may be drawn, the lowest first
    kept,  # [rows], int32: the mask of a row; -1: none
    starts,  # [rows, 4], float32
    firsts,  # [rows], int32
    scores,  # [rows, chunks], float64
    winners,  # [rows, chunks], int32
    space,  # [rows, SPACE_BLOCKS * LANES], float32
    drawn,  # [rows], int32: -1 where a row is broken
    stride,
    vocab,
    num_chunks,
    mask_words,
    CHUNKS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Each row's token. It is of the nucleus if the mass of better ones is below p; if it is not, then neither is
    anything that is no better, and the rest race again. Grid: (rows,).
    """
    program = tl.program_id(0).to(tl.int64)
    row, record, start = logits + program * stride, records + program * RECORD, starts + program * 4
    scale, given = float_at(record + INVERSE_TEMPERATURE), tl.load(record + GIVEN)
    token = tl.load(firsts + program)
    if (token >= 0) & (given >= 0):
        token = given
    if (token >= 0) & (given < 0) & (scale != 0.0):
        chunks = tl.arange(0, CHUNKS)
        own = program * num_chunks + chunks
        score_of = tl.load(scores + own, mask=chunks < num_chunks, other=-float("inf"))
        best = tl.max(score_of, 0)
        places = tl.load(winners + own, mask=(chunks < num_chunks) & (score_of == best), other=NO_PLACE)
        token = tl.where(best > -float("inf"), tl.min(places, 0), token)
        top_p = double_at(record + TOP_P)
        top, least, needed = tl.load(start), tl.load(start + 1), tl.load(start + 2)
        if top_p < 1.0:
            key = noise_key(tl.load(record + SEED), tl.load(record + SEED + 1), tl.load(record + POSITION))
            keeps = kept_mask(kept, program, MASKED)
            mask = masks + tl.maximum(keeps, 0).to(tl.int64) * mask_words
            room, num_blocks = space + program * SPACE_BLOCKS * LANES, num_chunks * CHUNK_BLOCKS
            scaled = flushed(logit_of(row, token, mask, keeps, MASKED) * scale)
            is_open = (scaled != top).to(tl.int32)
            while is_open > 0:
                of_all, above = masses(row, scale, top, least, scaled, vocab, num_blocks, room, mask, keeps, MASKED)
                is_open = (above >= top_p * of_all).to(tl.int32)
                if is_open > 0:
                    token = race_above(row, scale, key, least, scaled, needed, vocab, num_chunks, mask, keeps, MASKED)
                    scaled = flushed(logit_of(row, token, mask, keeps, MASKED) * scale)
                    is_open = (scaled != top).to(tl.int32)
    tl.store(drawn + program, token)
