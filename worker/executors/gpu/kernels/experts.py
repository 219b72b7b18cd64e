"""Triton kernels of a mixture of experts around its products: the choice, the grouping of rows, the sum of experts.

Shapes are those of the step, whatever is chosen: how rows are grouped is written as numbers (-1: nothing), which the
products read (`experts.py`), so the host waits for nothing.
"""

import triton
import triton.language as tl

from holdfast.worker.executors.gpu.kernels.exact import flushed, ordered, unordered

SOFTMAX = tl.constexpr(0)
SOFTMAX_OF_TOP = tl.constexpr(1)
SIGMOID = tl.constexpr(2)

PLACES = tl.constexpr(1024)
_PLACE_BITS = tl.constexpr(10)
_TAKEN = tl.constexpr(-(1 << 62))


@triton.jit
def _score(logits, largest, SCORING: tl.constexpr):
    return 1.0 / (1.0 + tl.exp(-logits)) if SCORING == SIGMOID else tl.exp(logits - largest)


@triton.jit
def choose_experts(
    logits,  # [rows, stride], float32: the experts' are the first
    slots,  # [rows], int32: below 0 for padding, whose rows go through no expert
    chosen,  # [rows, TOP_K], int32: ascending; -1 for padding
    weights,  # [rows, TOP_K], float32
    stride,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """The experts with the largest logits, of equal ones the first; and what each of them counts. Grid: (rows,)."""
    row = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    is_expert = places < EXPERTS
    x = flushed(tl.load(logits + row.to(tl.int64) * stride + places, mask=is_expert, other=0.0))
    keys = (ordered(x).to(tl.int64) << _PLACE_BITS) + (PLACES - 1 - places)
    keys = tl.where(is_expert, keys, _TAKEN)
    largest = unordered((tl.max(keys, 0) >> _PLACE_BITS).to(tl.int32))
    kept = 0.0
    for _ in range(TOP_K):
        best = tl.max(keys, 0)
        kept += _score(unordered((best >> _PLACE_BITS).to(tl.int32)), largest, SCORING)
        keys = tl.where(keys == best, _TAKEN, keys)
    share = _score(x, largest, SCORING)
    if NORMALIZED or SCORING == SOFTMAX_OF_TOP:
        share = share / kept
    elif SCORING == SOFTMAX:
        share = share / tl.sum(tl.where(is_expert, share, 0.0), 0)
    is_chosen = is_expert & (keys == _TAKEN)
    numbers = row.to(tl.int64) * TOP_K + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    expert = tl.where(tl.load(slots + row) >= 0, places, -1)
    tl.store(chosen + numbers, expert, mask=is_chosen)
    tl.store(weights + numbers, share, mask=is_chosen)


@triton.jit(do_not_specialize=["num_chosen", "num_tiles"])
def group_rows(
    chosen,  # [num_chosen], int32: expert, or -1
    tile_experts,  # [num_tiles], int32: each tile's expert; -1 for a tile that is not needed
    tile_rows,  # [num_tiles, ROWS], int32: places in `chosen`; -1 where a tile is not full
    num_chosen,
    num_tiles,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The places that chose each expert, in order, in tiles of ROWS; experts follow each other. Grid: (EXPERTS,).

    Each program counts all choices, so that it knows where its own tiles begin without another kernel before it.
    """
    expert = tl.program_id(0)
    bins, some = tl.arange(0, BINS), tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for first in range(0, num_chosen, BLOCK):
        each = tl.load(chosen + first + some, mask=first + some < num_chosen, other=-1)
        counts += tl.histogram(tl.maximum(each, 0), BINS, mask=each >= 0)
    num_each = (counts + (ROWS - 1)) // ROWS
    first_tile = tl.sum(tl.where(bins < expert, num_each, 0), 0)
    num_own = tl.sum(tl.where(bins == expert, num_each, 0), 0)
    rows = tile_rows + first_tile * ROWS
    taken = 0
    for first in range(0, num_chosen, BLOCK):
        each = tl.load(chosen + first + some, mask=first + some < num_chosen, other=-1)
        is_own = (each == expert).to(tl.int32)
        tl.store(rows + taken + tl.cumsum(is_own, 0) - 1, first + some, mask=is_own > 0)
        taken += tl.sum(is_own, 0)
    rest = taken + tl.arange(0, ROWS)
    tl.store(rows + rest, -1, mask=rest < num_own * ROWS)
    for first in range(0, num_own, BLOCK):
        tl.store(tile_experts + first_tile + first + some, expert, mask=first + some < num_own)
    if expert == EXPERTS - 1:
        for first in range(first_tile + num_own, num_tiles, BLOCK):
            tl.store(tile_experts + first + some, -1, mask=first + some < num_tiles)


@triton.jit(do_not_specialize=["num_rows"])
def add_experts(
    sums,  # [SLICES, rows, TOP_K, columns], float32: what each chosen expert gave
    chosen,  # [rows, TOP_K], int32: ascending, or -1
    weights,  # [rows, TOP_K], float32
    bias,  # [experts, hidden], float32: of the experts' second linears
    shared,  # [SLICES, rows, hidden], float32: the output of the shared expert
    gates,  # [rows, gate_stride], float32: the logit of its weight
    out,  # [rows, hidden], float32
    num_rows,
    columns,
    hidden,
    gate_stride,
    BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """Adds the experts of a row for each slice in ascending order, the shared one last, and then the slices as a binary
    tree: the order of the executor for CPUs. For a block of hidden columns. Grid: (rows, blocks of columns).
    """
    row = tl.program_id(0).to(tl.int64)
    slices, places = tl.arange(0, SLICES)[:, None], tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (places < columns) & (slices >= 0)
    total = tl.zeros((SLICES, BLOCK), dtype=tl.float32)
    for number in tl.static_range(TOP_K):
        choice = row * TOP_K + number
        expert = tl.load(chosen + choice)
        is_there = expert >= 0
        weight = tl.load(weights + choice, mask=is_there, other=0.0)
        part = (slices.to(tl.int64) * num_rows * TOP_K + choice) * columns + places
        x = tl.load(sums + part, mask=mask & is_there, other=0.0)
        if HAS_BIAS:
            of_first = mask & is_there & (slices == 0)
            x += tl.load(bias + expert.to(tl.int64) * hidden + places + slices * 0, mask=of_first, other=0.0)
        total = tl.fma(x, tl.broadcast_to(weight, (SLICES, BLOCK)), total)
    if HAS_SHARED:
        x = tl.load(shared + (slices.to(tl.int64) * num_rows + row) * hidden + places, mask=mask, other=0.0)
        weight = 1.0
        if HAS_GATE:
            weight = 1.0 / (1.0 + tl.exp(-tl.load(gates + row * gate_stride)))
        total = tl.fma(x, tl.full((SLICES, BLOCK), 0.0, tl.float32) + weight, total)
    if SLICES >= 8:
        total = tl.sum(tl.reshape(total, (4, 2, BLOCK)), 1)
    if SLICES >= 4:
        total = tl.sum(tl.reshape(total, (2, 2, BLOCK)), 1)
    if SLICES >= 2:
        total = tl.sum(tl.reshape(total, (1, 2, BLOCK)), 1)
    tl.store(out + row * hidden + places, total, mask=places < columns)


@triton.jit(do_not_specialize=["num_chosen"])
def grouped_linear(
    x,  # [rows, inputs], dtype of the model
    weight,  # [experts, outputs, inputs], dtype of the model; experts lie `expert_stride` apart
    bias,  # [experts, outputs], float32
    out,  # [slices, num_chosen, outputs], float32, or the model's dtype: sums are rounded once
    tile_experts,  # [tiles], int32: -1 for a tile that is not needed
    tile_rows,  # [tiles, ROWS], int32: places of `out`, or -1
    num_chosen,
    num_inputs,
    num_outputs,
    expert_stride,
    slice_units,  # inputs of a slice, in units of UNIT
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    SHARERS: tl.constexpr,  # places of `out` that share a row of x: it is place // SHARERS
    UNIT: tl.constexpr,  # a power of two: the compiler knows that slices are multiples of it
    EVEN: tl.constexpr,  # a slice is a whole number of tiles of INPUTS
    HAS_BIAS: tl.constexpr,
):
    """Each slice of the inputs is summed by itself from zero. Places that no tile names are not written.

    Grid: (tiles, tiles of outputs, slices). Tiles of an expert are next to each other, so that they read a tile of its
    weights from the L2 cache.
    """
    expert = tl.load(tile_experts + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    slice_inputs = slice_units * UNIT
    places = tl.load(tile_rows + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    inputs = tl.arange(0, INPUTS)
    is_output, is_row = outputs < num_outputs, places >= 0
    rows = tl.where(is_row, places // SHARERS, 0)
    of_expert = weight + expert * expert_stride
    weights = of_expert + outputs[:, None].to(tl.int64) * num_inputs + part * slice_inputs + inputs[None, :]
    columns = x + rows[None, :].to(tl.int64) * num_inputs + part * slice_inputs + inputs[:, None]
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for first in range(0, slice_inputs, INPUTS):
        if EVEN:
            w = tl.load(weights, mask=is_output[:, None], other=0.0)
            column = tl.load(columns, mask=is_row[None, :], other=0.0)
        else:
            is_input = first + inputs < slice_inputs
            w = tl.load(weights, mask=is_output[:, None] & is_input[None, :], other=0.0)
            column = tl.load(columns, mask=is_row[None, :] & is_input[:, None], other=0.0)
        total = tl.dot(w, column, total, input_precision="ieee")
        weights += INPUTS
        columns += INPUTS
    if HAS_BIAS:
        total += tl.load(bias + expert * num_outputs + outputs, mask=is_output, other=0.0)[:, None]
    to = out + (part.to(tl.int64) * num_chosen + places[None, :]) * num_outputs + outputs[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])
