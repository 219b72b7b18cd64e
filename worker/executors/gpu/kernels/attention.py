"""Triton kernels of paged attention: grouped-query, causal, with window, soft cap and sinks.

Keys lie on the M axis of the matrix instruction, and on its N axis the queries of one KV head: of one token or of many.
Keys are taken in tiles of 64 from position 0, and summed by themselves within each SPLIT of positions; splits are
merged in ascending order, by the program itself or by `merge_splits`. So a query's bits depend on its position and its
keys alone. A tile or split that a query does not see leaves its sums as they are. Values have VALUE_DIM dimensions, and
VALUE_DIMS with padding; both are 0 where they are as the keys'. Keys and values in fp8 become numbers of the model's
dtype, which rounds none of them, before anything is computed: the bits are those of a cache that holds these numbers.
"""

import triton
import triton.language as tl

from holdfast.worker.executors.gpu.kernels.heads import decoded, factor_of

KEYS = tl.constexpr(64)
SPLIT = tl.constexpr(1024)


@triton.jit
def _merged(total, best, weight, more, more_best, more_weight):
    """The sums over two disjoint sets of keys, as one. Either set may be empty: best is -inf, and the others 0."""
    top = tl.maximum(best, more_best)
    safe = tl.where(top == -float("inf"), 0.0, top)
    left, right = tl.exp(best - safe), tl.exp(more_best - safe)
    return total * left[None, :] + more * right[None, :], top, weight * left + more_weight * right


@triton.jit
def _divided(total, best, weight, sink, HAS_SINKS: tl.constexpr):
    """Attention's output; `sink` is one more score, without a value."""
    if HAS_SINKS:
        top = tl.maximum(best, sink)
        left = tl.exp(best - top)
        total, weight = total * left[None, :], weight * left + tl.exp(sink - top)
    return total / weight[None, :]


@triton.jit
def _nothing_summed(DIMS: tl.constexpr, ROWS: tl.constexpr):
    """The sums over no key: total, best score, weight."""
    total = tl.zeros((DIMS, ROWS), dtype=tl.float32)
    return total, tl.full((ROWS,), -float("inf"), dtype=tl.float32), tl.zeros((ROWS,), dtype=tl.float32)


@triton.jit
def _columns(first_row, count, kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Mask, row and query head of each column of a tile."""
    column = tl.arange(0, ROWS)
    is_row = column // GROUP < count
    return is_row, (first_row + column // GROUP).to(tl.int64), kv_head * GROUP + column % GROUP


@triton.jit
def _places(is_row, row, head, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr):
    """Offsets of a tile's columns in [rows, NUM_HEADS, DIM], and the mask of [DIMS, ROWS]."""
    dims = tl.arange(0, DIMS)
    places = (row * NUM_HEADS + head)[None, :] * DIM + dims[:, None]
    return places, is_row[None, :] & (dims < DIM)[:, None]


@triton.jit
def _store_output(out, places, mask, total, best, weight, sinks, head, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Writes attention's output of a tile."""
    sink = tl.zeros((ROWS,), dtype=tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head)
    y = _divided(total, best, weight, sink, HAS_SINKS)
    tl.store(out + places, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _split_memory(
    totals, bests, weights, split, kv_head, KV_HEADS: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr
):
    """Addresses of a split's sums: its total [DIMS, ROWS], best scores and weights [ROWS]. Added up in this order, they
    take fewer registers.
    """
    place = (split * tl.num_programs(0) + tl.program_id(0)) * KV_HEADS + kv_head
    column = tl.arange(0, ROWS)
    sums = totals + place * (DIMS * ROWS)
    total = sums + tl.arange(0, DIMS)[:, None] * ROWS + column[None, :]
    return total, bests + place * ROWS + column, weights + place * ROWS + column


@triton.jit
def _first_key(first_position, WINDOW: tl.constexpr):
    """Start of the first tile of keys that a query at this position can see."""
    if WINDOW > 0:
        return tl.maximum(first_position - WINDOW + 1, 0) // KEYS * KEYS
    else:
        return 0


@triton.jit
def _tile_of(pool, memory, mask, scales, scale_places, is_key, DTYPE: tl.constexpr, IN_FP8: tl.constexpr):
    """A tile of keys or values [KEYS, DIMS or VALUE_DIMS]."""
    tile = tl.load(pool + memory, mask=mask, other=0)
    if IN_FP8:
        factors = factor_of(tl.load(scales + scale_places, mask=is_key, other=0))[:, None]
        tile = decoded(tile, factors).to(DTYPE)
    return tile


@triton.jit
def _scores(k, q, places, position, scaling, softcap, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Scores [KEYS, ROWS] of keys at `places` for queries at `position`; -inf where a query does not see a key."""
    scores = tl.dot(k, q, input_precision="ieee") * scaling
    if HAS_SOFTCAP:
        scores = softcap - 2.0 * softcap / (tl.exp(2.0 * scores / softcap) + 1.0)
    seen = places[:, None] <= position[None, :]
    if WINDOW > 0:
        seen = seen & (places[:, None] > position[None, :] - WINDOW)
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _one_split(
    q,
    position,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    kv_head,
    first,
    end,
    scaling,
    softcap,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILES_IN_BLOCKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    IN_FP8: tl.constexpr,
):
    """(sum of weighted values [VALUE_DIMS, ROWS], best score [ROWS], sum of weights [ROWS]) over keys first .. end."""
    dims = tl.arange(0, DIMS)
    is_dim = dims < HEAD_DIM
    total, best, weight = _nothing_summed(VALUE_DIMS or DIMS, ROWS)
    for start in range(first, end, KEYS):
        places = start + tl.arange(0, KEYS)
        is_key = places < end
        if TILES_IN_BLOCKS:
            blocks = tl.load(table + start // BLOCK).to(tl.int64)
        else:
            blocks = tl.load(table + places // BLOCK, mask=is_key, other=0).to(tl.int64)
        slots = blocks * BLOCK + places % BLOCK
        memory = (slots[:, None] * KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
        mask = is_key[:, None] & is_dim[None, :]
        scale_places = (blocks * KV_HEADS + kv_head) * BLOCK + places % BLOCK
        k = _tile_of(keys, memory, mask, key_scales, scale_places, is_key, q.dtype, IN_FP8)
        scores = _scores(k, q, places, position, scaling, softcap, WINDOW, HAS_SOFTCAP)
        top = tl.maximum(best, tl.max(scores, 0))
        safe = tl.where(top == -float("inf"), 0.0, top)
        shares = tl.exp(scores - safe[None, :])
        left = tl.exp(best - safe)
        weight = weight * left + tl.sum(shares, 0)
        if VALUE_DIM > 0:
            value_dims = tl.arange(0, VALUE_DIMS)
            memory = (slots[:, None] * KV_HEADS + kv_head) * VALUE_DIM + value_dims[None, :]
            mask = is_key[:, None] & (value_dims < VALUE_DIM)[None, :]
        v = _tile_of(values, memory, mask, value_scales, scale_places, is_key, q.dtype, IN_FP8)
        total = tl.dot(tl.trans(v), shares.to(v.dtype), total * left[None, :], input_precision="ieee")
        best = top
    return total, best, weight


@triton.jit
def attend(
    queries,  # [rows, KV_HEADS * GROUP, HEAD_DIM]
    keys,  # [blocks, BLOCK, KV_HEADS, HEAD_DIM], uint8 in fp8
    values,
    key_scales,  # in fp8: [blocks, KV_HEADS, BLOCK], uint8
    value_scales,
    out,  # [rows, KV_HEADS * GROUP * VALUE_DIM], dtype of the model
    split_totals,  # [splits, tiles, KV_HEADS, VALUE_DIMS, ROWS], float32
    split_bests,  # [splits, tiles, KV_HEADS, ROWS], float32; likewise the weights
    split_weights,
    tiles,  # [tiles, 3], int32: first row, number of rows, sequence
    positions,  # [rows], int32
    tables,  # [sequences, table_stride], int32
    sinks,  # [heads], float32
    table_stride,
    scaling,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLITS_OUTSIDE: tl.constexpr,
    TILES_IN_BLOCKS: tl.constexpr,  # a block holds a whole number of tiles of keys
    VALUE_DIM: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    IN_FP8: tl.constexpr,
):
    """Grid: (tiles, KV_HEADS, splits), or one program for all splits. A tile of no rows is padding.

    Column j of a tile is query head j % GROUP of its token j // GROUP. The rows of a tile follow each other.
    """
    tile = tiles + tl.program_id(0) * 3
    kv_head = tl.program_id(1)
    first_row, count, sequence = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if count > 0:
        is_row, row, head = _columns(first_row, count, kv_head, GROUP, ROWS)
        position = tl.load(positions + row, mask=is_row, other=-1)
        first_position = tl.load(positions + first_row)
        end = first_position + count
        places, mask = _places(is_row, row, head, KV_HEADS * GROUP, HEAD_DIM, DIMS)
        q = tl.load(queries + places, mask=mask, other=0.0)
        table = tables + sequence.to(tl.int64) * table_stride
        begin = _first_key(first_position, WINDOW)
        if SPLITS_OUTSIDE:
            split = tl.program_id(2)
            first, last = tl.maximum(begin, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT)
            if first < last:
                total, best, weight = _one_split(
                    q,
                    position,
                    keys,
                    values,
                    key_scales,
                    value_scales,
                    table,
                    kv_head,
                    first,
                    last,
                    scaling,
                    softcap,
                    KV_HEADS,
                    HEAD_DIM,
                    DIMS,
                    BLOCK,
                    ROWS,
                    WINDOW,
                    HAS_SOFTCAP,
                    TILES_IN_BLOCKS,
                    VALUE_DIM,
                    VALUE_DIMS,
                    IN_FP8,
                )
                at_total, at_best, at_weight = _split_memory(
                    split_totals, split_bests, split_weights, split, kv_head, KV_HEADS, VALUE_DIMS or DIMS, ROWS
                )
                tl.store(at_total, total)
                tl.store(at_best, best)
                tl.store(at_weight, weight)
        else:
            total, best, weight = _nothing_summed(VALUE_DIMS or DIMS, ROWS)
            for split in range(begin // SPLIT, tl.cdiv(end, SPLIT)):
                more, more_best, more_weight = _one_split(
                    q,
                    position,
                    keys,
                    values,
                    key_scales,
                    value_scales,
                    table,
                    kv_head,
                    tl.maximum(begin, split * SPLIT),
                    tl.minimum(end, (split + 1) * SPLIT),
                    scaling,
                    softcap,
                    KV_HEADS,
                    HEAD_DIM,
                    DIMS,
                    BLOCK,
                    ROWS,
                    WINDOW,
                    HAS_SOFTCAP,
                    TILES_IN_BLOCKS,
                    VALUE_DIM,
                    VALUE_DIMS,
                    IN_FP8,
                )
                total, best, weight = _merged(total, best, weight, more, more_best, more_weight)
            if VALUE_DIM > 0:
                places, mask = _places(is_row, row, head, KV_HEADS * GROUP, VALUE_DIM, VALUE_DIMS)
            _store_output(out, places, mask, total, best, weight, sinks, head, ROWS, HAS_SINKS)


@triton.jit
def merge_splits(
    out,
    split_totals,
    split_bests,
    split_weights,
    tiles,
    positions,
    sinks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
):
    """Merges splits of `attend` that are separate programs. Grid: (tiles, KV_HEADS)."""
    tile = tiles + tl.program_id(0) * 3
    kv_head = tl.program_id(1)
    first_row, count = tl.load(tile), tl.load(tile + 1)
    if count > 0:
        is_row, row, head = _columns(first_row, count, kv_head, GROUP, ROWS)
        first_position = tl.load(positions + first_row)
        places, mask = _places(is_row, row, head, KV_HEADS * GROUP, VALUE_DIM or HEAD_DIM, VALUE_DIMS or DIMS)
        total, best, weight = _nothing_summed(VALUE_DIMS or DIMS, ROWS)
        for split in range(_first_key(first_position, WINDOW) // SPLIT, tl.cdiv(first_position + count, SPLIT)):
            at_total, at_best, at_weight = _split_memory(
                split_totals, split_bests, split_weights, split, kv_head, KV_HEADS, VALUE_DIMS or DIMS, ROWS
            )
            more, more_best, more_weight = tl.load(at_total), tl.load(at_best), tl.load(at_weight)
            total, best, weight = _merged(total, best, weight, more, more_best, more_weight)
        _store_output(out, places, mask, total, best, weight, sinks, head, ROWS, HAS_SINKS)
