"""Triton kernel that writes a step's new keys and values into the pages of a cache.

What may not live here: kernels that make keys and values themselves (`heads.py`).
"""

import triton
import triton.language as tl


@triton.jit
def write_pages(
    key,  # [KV_HEADS, rows, KEY_DIM] with any strides but of the last dimension
    value,  # [KV_HEADS, rows, VALUE_DIM], likewise
    keys,  # [slots, KV_HEADS, KEY_DIM]
    values,  # [slots, KV_HEADS, VALUE_DIM]
    slots,  # [rows], int32; below 0: padding
    key_head_stride,
    key_row_stride,
    value_head_stride,
    value_row_stride,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_DIMS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
):
    """Grid: (rows, KV_HEADS)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        dims = tl.arange(0, KEY_DIMS)
        mask = dims < KEY_DIM
        k = tl.load(key + head * key_head_stride + row * key_row_stride + dims, mask=mask)
        tl.store(keys + (slot * KV_HEADS + head) * KEY_DIM + dims, k, mask=mask)
        dims = tl.arange(0, VALUE_DIMS)
        mask = dims < VALUE_DIM
        v = tl.load(value + head * value_head_stride + row * value_row_stride + dims, mask=mask)
        tl.store(values + (slot * KV_HEADS + head) * VALUE_DIM + dims, v, mask=mask)
