"""Triton kernel of the linears of a mixture's experts: rows that chose an expert, gathered in tiles of one expert each.

The order of adding is that of `linear.py`: outputs on the M axis of the matrix instruction, rows on its N axis, inputs
from first to last, so a row's sum does not depend on what else chose its expert. What may not live here: which rows
are in a tile (`experts.py`).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_chosen"])
def grouped_linear(
    x,  # [rows, inputs], dtype of the model
    weight,  # [experts, outputs, inputs], dtype of the model; experts lie `expert_stride` apart
    bias,  # [experts, outputs], float32
    out,  # [slices, num_chosen, outputs], float32
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
    tl.store(to, total, mask=is_output[:, None] & is_row[None, :])
