"""Triton kernel of an MLP's middle: the activation, times the other half where there is a gate.

What may not live here: the linears around it (`linear.py`).
"""

import triton
import triton.language as tl

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
