"""Triton kernel of a linear: `x W^T + b`, with one order of adding for any number of rows.

Outputs lie on the M axis of the matrix instruction and tokens on its N axis: a token's sum is taken by the same
instruction over the same 16 inputs at a time, from first to last, whether a tile holds 16 tokens or 128, and whether
the weights are numbers or codes that become these numbers.
"""

import triton
import triton.language as tl

from holdfast.worker.executors.gpu.kernels.codes import NUMBERS, coded_tile


@triton.jit
def capped(x, scale, softcap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Logits from sums."""
    if HAS_SCALE:
        x *= scale
    if HAS_SOFTCAP:
        x = softcap - 2.0 * softcap / (tl.exp(2.0 * x / softcap) + 1.0)
    return x


@triton.jit(do_not_specialize=["num_rows"])
def linear(
    x,  # [rows, inputs], dtype of the model
    weight,  # [outputs, inputs], dtype of the model; or codes
    scales,  # of codes, as the next four (`codes.py`)
    offsets,
    groups,
    bias,  # [outputs], float32
    out,  # [slices, rows, outputs], float32, or the model's dtype: sums are rounded once
    num_rows,
    num_inputs,
    num_outputs,
    slice_inputs,  # inputs of a slice
    num_groups,
    group_inputs,
    scale,
    softcap,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    CODE: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,  # a slice is a whole number of tiles of INPUTS
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Each slice of the inputs is summed by itself from zero; `tree_of` (`layers.py`) adds them.

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
        if CODE != NUMBERS:
            w = coded_tile(
                weight,
                scales,
                offsets,
                groups,
                outputs,
                is_output,
                part * slice_inputs + first,
                slice_inputs - first,
                num_inputs,
                num_groups,
                group_inputs,
                OUTPUTS,
                INPUTS,
                CODE,
                OFFSET,
                GROUP,
                EVEN,
                x.dtype.element_ty,
            )
        elif EVEN:
            w = tl.load(weights, mask=is_output[:, None], other=0.0)
        else:
            is_input = first + inputs < slice_inputs
            w = tl.load(weights, mask=is_output[:, None] & is_input[None, :], other=0.0)
        if EVEN:
            column = tl.load(columns, mask=is_token[None, :], other=0.0)
        else:
            is_input = first + inputs < slice_inputs
            column = tl.load(columns, mask=is_token[None, :] & is_input[:, None], other=0.0)
        total = tl.dot(w, column, total, input_precision="ieee")
        weights += INPUTS
        columns += INPUTS
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0)[:, None]
    total = capped(total, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    places = out + (part.to(tl.int64) * num_rows + tokens[None, :]) * num_outputs + outputs[:, None]
    tl.store(places, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_token[None, :])


@triton.jit(do_not_specialize=["num_values"])
def cap(
    x,  # [values], float32, in place
    num_values,
    scale,
    softcap,
    BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Makes logits of sums that a linear has left as they are. Grid: (blocks,)."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_values
    values = tl.load(x + places, mask=mask, other=0.0)
    tl.store(x + places, capped(values, scale, softcap, HAS_SCALE, HAS_SOFTCAP), mask=mask)


NO_NORM = tl.constexpr(0)
RMS_NORM = tl.constexpr(1)
LAYER_NORM = tl.constexpr(2)


@triton.jit
def embed(
    token_ids,  # [rows], int32
    table,  # [rows of this rank, hidden], dtype of the model
    residual,  # [rows, hidden], float32
    first_id,
    num_ids,
    hidden,
    scale,
    BLOCK: tl.constexpr,
):
    """The rows of this rank's share of the vocabulary; zeros for the tokens of other ranks."""
    row = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    token = tl.load(token_ids + row) - first_id
    is_here = (token >= 0) & (token < num_ids)
    token = tl.where(is_here, token, 0).to(tl.int64)
    x = tl.load(table + token * hidden + places, mask=(places < hidden) & is_here, other=0.0).to(tl.float32)
    tl.store(residual + row.to(tl.int64) * hidden + places, x * scale, mask=places < hidden)


@triton.jit
def tree_of(parts, stride, places, mask, PARTS: tl.constexpr):
    """The sum of 1, 2, 4 or 8 arrays that lie `stride` apart, added as a binary tree."""
    total = tl.load(parts + places, mask=mask, other=0.0)
    if PARTS >= 2:
        total = total + tl.load(parts + stride + places, mask=mask, other=0.0)
    if PARTS >= 4:
        third = tl.load(parts + 2 * stride + places, mask=mask, other=0.0)
        total = total + (third + tl.load(parts + 3 * stride + places, mask=mask, other=0.0))
    if PARTS >= 8:
        fifth = tl.load(parts + 4 * stride + places, mask=mask, other=0.0)
        left = fifth + tl.load(parts + 5 * stride + places, mask=mask, other=0.0)
        seventh = tl.load(parts + 6 * stride + places, mask=mask, other=0.0)
        total = total + (left + (seventh + tl.load(parts + 7 * stride + places, mask=mask, other=0.0)))
    return total


@triton.jit
def normed_row(x, places, mask, weight, bias, length, eps, KIND: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A row after its norm, in float32. Places beyond it are zero before, and nothing after."""
    if KIND == LAYER_NORM:
        x = tl.where(mask, x - tl.sum(x, 0) / length, 0.0)
    if KIND != NO_NORM:
        x = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / length + eps)) * tl.load(weight + places, mask=mask, other=0.0)
        if HAS_BIAS:
            x += tl.load(bias + places, mask=mask, other=0.0)
    return x


@triton.jit(do_not_specialize=["num_values"])
def sum_parts(parts, out, num_values, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """parts [PARTS, values] -> out [values]: a rank's own slices, before the ranks add theirs."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_values
    tl.store(out + places, tree_of(parts, num_values, places, mask, PARTS), mask=mask)


@triton.jit
def sum_rows(
    x,  # [rows, length], of any dtype
    out,  # [rows], likewise
    length,
    divisor,
    BLOCK: tl.constexpr,
):
    """Sums of rows in float32, divided, and rounded once. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    values = tl.load(x + row * length + places, mask=places < length, other=0.0).to(tl.float32)
    tl.store(out + row, (tl.sum(values, 0) / divisor).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"])
def add_norm(
    residual,  # [rows, hidden], float32
    parts,  # [PARTS, rows, hidden], float32
    parts_bias,  # [hidden], float32
    out_weight,  # [hidden], float32
    out_bias,
    weight,  # [hidden], float32
    bias,
    out,  # [programs, hidden], of any dtype
    wanted,  # [programs], int32: the rows to take
    progress,  # [1], int64, in memory that the host sees
    num_rows,
    hidden,
    residual_scale,
    out_eps,
    eps,
    residual_stride,
    out_stride,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_PARTS_BIAS: tl.constexpr,
    OUT_KIND: tl.constexpr,
    HAS_OUT_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SELECTS: tl.constexpr,
    WRITES_OUT: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """`residual += scale * out_norm(sum of parts + bias)`, then `out = norm(residual)`; without parts only the latter.

    With SELECTS, of the wanted rows alone, which are not written back. With COUNTS, the first program moves `progress`
    by one, so that the host sees a graph's layers pass. Grid: (rows,).
    """
    program = tl.program_id(0).to(tl.int64)
    row = program
    if SELECTS:
        row = tl.load(wanted + program).to(tl.int64)
    places = tl.arange(0, BLOCK)
    mask = places < hidden
    x = tl.load(residual + row * residual_stride + places, mask=mask, other=0.0)
    if PARTS > 0:
        stride = tl.cast(num_rows, tl.int64) * hidden
        y = tree_of(parts, stride, row * hidden + places, mask, PARTS)
        if HAS_PARTS_BIAS:
            y += tl.load(parts_bias + places, mask=mask, other=0.0)
        x += normed_row(y, places, mask, out_weight, out_bias, hidden, out_eps, OUT_KIND, HAS_OUT_BIAS) * residual_scale
        if not SELECTS:
            tl.store(residual + row * residual_stride + places, x, mask=mask)
    if WRITES_OUT:
        y = normed_row(x, places, mask, weight, bias, hidden, eps, KIND, HAS_BIAS)
        tl.store(out + program * out_stride + places, y.to(out.dtype.element_ty), mask=mask)
    if COUNTS and program == 0:
        tl.store(progress, tl.load(progress) + 1)


SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
RELU = tl.constexpr(3)
RELU_SQUARED = tl.constexpr(4)
CLAMPED_SWIGLU = tl.constexpr(5)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(
    up,  # [rows, inner], or [rows, 2 inner]: gate, then up; float32
    out,  # [rows, inner], dtype of the model
    inner,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """Grid: (rows, blocks of the inner dimension)."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = places < inner
    width = inner
    if HAS_GATE:
        width = 2 * inner
    x = tl.load(up + row * width + places, mask=mask, other=0.0)
    if KIND == SILU:
        y = x * _sigmoid(x)
    elif KIND == GELU:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == GELU_TANH:  # 0.5 (1 + tanh(u)) is the sigmoid of 2 u
        y = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == RELU:
        y = tl.maximum(x, 0.0)
    elif KIND == RELU_SQUARED:
        positive = tl.maximum(x, 0.0)
        y = positive * positive
    else:
        gate = tl.minimum(x, 7.0)
        y = gate * _sigmoid(1.702 * gate)
    if HAS_GATE:
        other = tl.load(up + row * width + inner + places, mask=mask, other=0.0)
        y = y * (tl.minimum(tl.maximum(other, -7.0), 7.0) + 1.0) if KIND == CLAMPED_SWIGLU else y * other
    tl.store(out + row * inner + places, y.to(out.dtype.element_ty), mask=mask)
