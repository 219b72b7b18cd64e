"""Triton kernel of a linear: `x W^T + b`, with one order of adding for any number of rows.

Outputs lie on the M axis of the matrix instruction and tokens on its N axis: a token's sum is taken by the same
instruction over the same 16 inputs at a time, from first to last, whether a tile holds 16 tokens or 128. What may not
live here: which tile is used when (`worker/decoder/gpu/launches.py`).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def linear(
    x,  # [rows, inputs], dtype of the model
    weight,  # [outputs, inputs], dtype of the model
    bias,  # [outputs], float32
    out,  # [slices, rows, outputs], float32
    num_rows,
    num_inputs,
    num_outputs,
    slice_inputs,  # inputs of a slice
    scale,
    softcap,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,  # a slice is a whole number of tiles of INPUTS
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Each slice of the inputs is summed by itself from zero; `tree_of` (`norm.py`) adds them.

    Grid: (tiles of tokens, tiles of outputs, slices). Tiles of tokens are next to each other, so that they read a
    tile of the weights from the L2 cache.
    """
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    inputs = tl.arange(0, INPUTS)
    is_output, is_token = outputs < num_outputs, tokens < num_rows
    weights = weight + outputs[:, None].to(tl.int64) * num_inputs + part * slice_inputs + inputs[None, :]
    columns = x + tokens[None, :].to(tl.int64) * num_inputs + part * slice_inputs + inputs[:, None]
    total = tl.zeros((OUTPUTS, TOKENS), dtype=tl.float32)
    for first in range(0, slice_inputs, INPUTS):
        if EVEN:
            w = tl.load(weights, mask=is_output[:, None], other=0.0)
            column = tl.load(columns, mask=is_token[None, :], other=0.0)
        else:
            is_input = first + inputs < slice_inputs
            w = tl.load(weights, mask=is_output[:, None] & is_input[None, :], other=0.0)
            column = tl.load(columns, mask=is_token[None, :] & is_input[:, None], other=0.0)
        total = tl.dot(w, column, total, input_precision="ieee")
        weights += INPUTS
        columns += INPUTS
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0)[:, None]
    if HAS_SCALE:
        total *= scale
    if HAS_SOFTCAP:
        total = softcap - 2.0 * softcap / (tl.exp(2.0 * total / softcap) + 1.0)
    places = out + (part.to(tl.int64) * num_rows + tokens[None, :]) * num_outputs + outputs[:, None]
    tl.store(places, total, mask=is_output[:, None] & is_token[None, :])
