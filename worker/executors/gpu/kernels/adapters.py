"""Triton kernels of low-rank adapters: what rows of a step add to a linear, `B (scale A x)`, by the adapter of each.

An adapter's matrices lie in memory of its own. A table in a fixed place, which graphs read, has a record for each slot
and linear: addresses, and the ranks of the linear's modules one after the other. Rows are grouped by slot, in tiles.

One order of adding, whatever the company: A's products are sums over pieces of PIECE inputs of a slice, from first to
last by the matrix instruction's 16 inputs at a time, and the pieces are added in ascending order and scaled; B's are
one sum over ranks in ascending order. It is added to the slice's sum before slices and ranks add theirs.
"""

import triton
import triton.language as tl

PIECE = tl.constexpr(512)
RANKS = tl.constexpr(16)
"""Ranks of a program, and of a turn of its loop: the fewest that `tl.dot` takes."""

MAX_PARTS = tl.constexpr(3)
"""Modules of one linear."""
WORDS = tl.constexpr(9)
"""int64 words of a record: addresses of A [ranks, inputs], B [outputs, width] and the scales [ranks], float32; number
of ranks, 0 for nothing; width; and where the ranks of each module begin, with an end.
"""
A = tl.constexpr(0)
B = tl.constexpr(1)
SCALES = tl.constexpr(2)
COUNT = tl.constexpr(3)
WIDTH = tl.constexpr(4)
FIRSTS = tl.constexpr(5)


@triton.jit
def record_of(table, slot, site, num_sites):
    """A slot's record of a linear."""
    return table + (slot.to(tl.int64) * num_sites + site) * WORDS


@triton.jit(do_not_specialize=["num_rows", "site", "num_sites"])
def shrink(
    x,  # [rows, inputs], dtype of the model
    table,  # [slots, sites, WORDS], int64
    inner,  # [slices * pieces, rows, stride], float32
    tile_slots,  # [tiles], int32: -1 for a tile that is not needed
    tile_rows,  # [tiles, ROWS], int32: -1 where a tile is not full
    num_rows,
    num_inputs,
    slice_inputs,  # inputs of a slice
    stride,
    site,
    num_sites,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    PIECES: tl.constexpr,  # of a slice
    EVEN: tl.constexpr,  # a slice is a whole number of pieces
):
    """A x of each piece. Grid: (tiles, blocks of RANKS, slices * pieces)."""
    slot = tl.load(tile_slots + tl.program_id(0))
    if slot < 0:
        return
    record = record_of(table, slot, site, num_sites)
    count = tl.load(record + COUNT).to(tl.int32)
    first_rank = tl.program_id(1) * RANKS
    if first_rank >= count:
        return
    part = tl.program_id(2)
    rows = tl.load(tile_rows + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    ranks, inputs = first_rank + tl.arange(0, RANKS), tl.arange(0, INPUTS)
    is_row, is_rank = rows >= 0, ranks < count
    begin = part % PIECES * PIECE
    length = tl.minimum(slice_inputs - begin, PIECE)
    first = part // PIECES * slice_inputs + begin
    numbers = tl.multiple_of(tl.load(record + A).to(tl.pointer_type(x.dtype.element_ty)), 16)
    of_a = numbers + ranks[:, None].to(tl.int64) * num_inputs + first + inputs[None, :]
    columns = x + rows[None, :].to(tl.int64) * num_inputs + first + inputs[:, None]
    total = tl.zeros((RANKS, ROWS), dtype=tl.float32)
    for done in range(0, length, INPUTS):
        if EVEN:
            a = tl.load(of_a, mask=is_rank[:, None], other=0.0)
            column = tl.load(columns, mask=is_row[None, :], other=0.0)
        else:
            is_input = done + inputs < length
            a = tl.load(of_a, mask=is_rank[:, None] & is_input[None, :], other=0.0)
            column = tl.load(columns, mask=is_row[None, :] & is_input[:, None], other=0.0)
        total = tl.dot(a, column, total, input_precision="ieee")
        of_a += INPUTS
        columns += INPUTS
    places = inner + (part.to(tl.int64) * num_rows + rows[None, :]) * stride + ranks[:, None]
    tl.store(places, total, mask=is_rank[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_ids", "site", "num_sites", "first_id"])
def look_up(
    token_ids,  # [rows], int32
    slots,  # [rows], int32: -1 for a row without an adapter
    like,  # any tensor of the model's dtype
    table,  # [slots, sites, WORDS], int64
    inner,  # [rows, stride], float32
    first_id,
    num_ids,  # inputs of A: the tokens of this rank
    stride,
    site,
    num_sites,
    scale,  # of all embeddings
    BLOCK: tl.constexpr,  # at least as many as ranks
):
    """The token's column of A; zeros for the tokens of other ranks. Grid: (rows,)."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    record = record_of(table, slot, site, num_sites)
    count = tl.load(record + COUNT).to(tl.int32)
    ranks = tl.arange(0, BLOCK)
    token = tl.load(token_ids + row) - first_id
    is_here = (token >= 0) & (token < num_ids)
    of_a = tl.load(record + A).to(tl.pointer_type(like.dtype.element_ty)) + tl.where(is_here, token, 0)
    x = tl.load(of_a + ranks.to(tl.int64) * num_ids, mask=(ranks < count) & is_here, other=0.0).to(tl.float32)
    tl.store(inner + row.to(tl.int64) * stride + ranks, x * scale, mask=ranks < count)


@triton.jit(do_not_specialize=["num_rows", "site", "num_sites"])
def expand(
    inner,  # [slices * pieces, rows, stride], float32
    like,  # any tensor of the model's dtype
    table,  # [slots, sites, WORDS], int64
    part_of,  # [outputs], int32: the number of an output's module
    out,  # [slices, rows, outputs], float32
    tile_slots,  # [tiles], int32: -1 for a tile that is not needed
    tile_rows,  # [tiles, ROWS], int32: -1 where a tile is not full
    num_rows,
    num_outputs,
    stride,
    site,
    num_sites,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,  # of a slice
):
    """Adds B (scale A x) to the sum of each slice. Rows that no tile names stay as they are.

    Grid: (tiles, tiles of outputs, slices).
    """
    slot = tl.load(tile_slots + tl.program_id(0))
    if slot < 0:
        return
    record = record_of(table, slot, site, num_sites)
    if tl.load(record + COUNT) == 0:
        return
    part = tl.program_id(2)
    rows = tl.load(tile_rows + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    outputs, some = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, RANKS)
    is_row, is_output = rows >= 0, outputs < num_outputs
    modules = tl.load(part_of + outputs, mask=is_output, other=-1)
    width = tl.multiple_of(tl.load(record + WIDTH), 16)
    of_b = tl.multiple_of(tl.load(record + B).to(tl.pointer_type(like.dtype.element_ty)), 16)
    of_b += outputs[:, None].to(tl.int64) * width
    scales = tl.load(record + SCALES).to(tl.pointer_type(tl.float32))
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    lowest = tl.min(tl.where(is_output, modules, MAX_PARTS), 0)
    for module in range(lowest, tl.max(modules, 0) + 1):
        first = tl.load(record + FIRSTS + module).to(tl.int32)
        end = tl.load(record + FIRSTS + module + 1).to(tl.int32)
        for rank in range(first, end, RANKS):
            ranks = rank + some
            is_rank = ranks < end
            column = tl.zeros((RANKS, ROWS), dtype=tl.float32)
            for piece in tl.static_range(PIECES):
                of_piece = inner + ((part * PIECES + piece).to(tl.int64) * num_rows + rows[None, :]) * stride
                column += tl.load(of_piece + ranks[:, None], mask=is_rank[:, None] & is_row[None, :], other=0.0)
            column *= tl.load(scales + ranks, mask=is_rank, other=0.0)[:, None]
            is_there = (modules == module)[:, None] & is_rank[None, :]
            b = tl.load(of_b + (rank - first + some)[None, :], mask=is_there, other=0.0).to(tl.float32)
            total = tl.dot(b, column, total, input_precision="ieee")
    places = out + (part.to(tl.int64) * num_rows + rows[None, :]) * num_outputs + outputs[:, None]
    mask = is_output[:, None] & is_row[None, :]
    tl.store(places, tl.load(places, mask=mask, other=0.0) + total, mask=mask)
