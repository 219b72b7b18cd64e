"""Triton kernels after the head: the best token of each row, and the logarithm of the sum of exponentials.

What may not live here: draws (`worker/sampling/`).
"""

import triton
import triton.language as tl

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
