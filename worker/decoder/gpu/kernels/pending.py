"""Triton kernel that puts tokens into a step which the step before has drawn. What may not live here: drawing them."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def put_in(
    token_ids,  # [rows], int32: below 0, -1 - the row of `drawn` that has the token
    drawn,  # [rows drawn], int32: -1 for a row without a token
    num_rows,
    BLOCK: tl.constexpr,
):
    """A row without a token is followed by token 0: what comes of it is thrown away. Grid: (blocks of rows,)."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    token = tl.load(token_ids + rows, mask=is_row, other=0)
    is_pending = is_row & (token < 0)
    known = tl.load(drawn + (-1 - token), mask=is_pending, other=0)
    tl.store(token_ids + rows, tl.maximum(known, 0), mask=is_pending)
