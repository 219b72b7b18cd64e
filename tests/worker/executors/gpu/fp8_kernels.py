"""The kernels' functions of rows in 8 bits, over rows: for tests under the interpreter and on a device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.worker.executors.gpu.kernels import heads as fp8
from holdfast.worker.executors.gpu.launches import Launch, triton_launch


@triton.jit
def _codes(x, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    codes = fp8.e4m3_of(tl.load(x + places, mask=places < count, other=0.0))
    tl.store(out + places, codes.to(tl.uint8), mask=places < count)


@triton.jit
def _encode(x, codes, scales, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    row, dims = tl.program_id(0), tl.arange(0, BLOCK)
    mask = dims < LENGTH
    values = tl.load(x + row * LENGTH + dims, mask=mask, other=0.0)
    found, scale = fp8.encoded(values.to(tl.float32), mask, x.dtype.element_ty)
    tl.store(codes + row * LENGTH + dims, found.to(tl.uint8), mask=mask)
    tl.store(scales + row, scale.to(tl.uint8))


@triton.jit
def _decode(codes, scales, out, LENGTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    places, mask = rows[:, None] * LENGTH + dims[None, :], (dims < LENGTH)[None, :]
    factors = fp8.factor_of(tl.load(scales + rows))
    values = fp8.decoded(tl.load(codes + places, mask=mask, other=0), factors[:, None])
    tl.store(out + places, values.to(out.dtype.element_ty), mask=mask)


def codes_of(x: Tensor, launch: Launch = triton_launch) -> Tensor:
    """float32 [n] -> uint8 [n]"""
    out = torch.empty(len(x), dtype=torch.uint8, device=x.device)
    arguments = {"x": x, "out": out, "count": len(x), "BLOCK": 4096}
    launch(_codes, (-(-len(x) // 4096),), arguments, num_warps=4, num_stages=1)
    return out


def encoded(x: Tensor, launch: Launch = triton_launch) -> tuple[Tensor, Tensor]:
    """Rows [r, n] -> codes [r, n], scales [r]"""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(x), dtype=torch.uint8, device=x.device)
    arguments = {"x": x, "codes": codes, "scales": scales, "LENGTH": x.shape[1], "BLOCK": _power(x.shape[1])}
    launch(_encode, (len(x),), arguments, num_warps=1, num_stages=1)
    return codes, scales


def decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype, launch: Launch = triton_launch) -> Tensor:
    """Codes [r, n], scales [r] -> rows [r, n]"""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    rows = 64 if len(codes) % 64 == 0 else 1
    sizes = {"LENGTH": codes.shape[1], "ROWS": rows, "BLOCK": _power(codes.shape[1])}
    arguments = {"codes": codes, "scales": scales, "out": out, **sizes}
    launch(_decode, (len(codes) // rows,), arguments, num_warps=4, num_stages=1)
    return out


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
