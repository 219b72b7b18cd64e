"""Numbers of GGUF's blocks: what codes, scales and minima of each type stand for, in float32.

The formulas are those of ggml's reference code, with the roundings of the `gguf` package: each operation by itself.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

_HALF: Final = 16
"""Codes of a block of 32 that are the low bits of their bytes; the high bits are the next 16."""


def dequantized(kind: str, blocks: Tensor) -> Tensor:
    """Blocks of a type [n, bytes of a block], uint8 -> their numbers [n, numbers of a block], float32."""
    return _FORMULAS[kind](blocks)


def _scale(blocks: Tensor, first: int) -> Tensor:
    """The float16 at a byte of each block [n, 1]."""
    return blocks[:, first : first + 2].view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[n, m, bytes] -> [n, m, 2 bytes]: first the low halves of all bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _codes(blocks: Tensor, first: int) -> Tensor:
    """Codes of four bits of a block of 32."""
    return _nibbles(blocks[:, first : first + _HALF])


def _fifth_bits(blocks: Tensor, first: int) -> Tensor:
    """The fifth bits of a block of 32 codes, in their place: bit i of four bytes belongs to code i."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[:, first : first + 4, None] >> shifts) & 1
    return bits.flatten(1) << 4


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_scale(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    return _codes(blocks, 2).float().sub_(8).mul_(_scale(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _codes(blocks, 4).float().mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _codes(blocks, 6) | _fifth_bits(blocks, 2)
    return codes.float().sub_(16).mul_(_scale(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _codes(blocks, 8) | _fifth_bits(blocks, 4)
    return codes.float().mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [n, 8, 1] of eight groups of 32, out of 12 bytes: of the first four groups the low six bits of
    the first eight bytes; of the others four bits in the last four bytes, and the two left over in the first eight.
    """
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((a & 63, (c & 15) | ((a >> 6) << 4)), 1)
    minima = torch.cat((b & 63, (c >> 4) | ((b >> 6) << 4)), 1)
    return scales.float()[..., None], minima.float()[..., None]


def _scaled_groups(codes: Tensor, blocks: Tensor) -> Tensor:
    """Codes [n, 8, 32], of blocks that begin with a scale and a minimum of all, and six bits of each for each group."""
    scales, minima = _six_bits(blocks[:, 4:16])
    scales *= _scale(blocks, 0)[..., None]
    minima *= _scale(blocks, 2)[..., None]
    return codes.float().mul_(scales).sub_(minima).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled_groups(_nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32), blocks)


def _q5_k(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]  # bit g of byte i belongs to code i of group g
    return _scaled_groups(codes | (((blocks[:, 16:48, None].mT >> shifts) & 1) << 4), blocks)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).view(-1, 8, 32)
    codes = (low | (high << 4)).float().sub_(32).view(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8).float() * _scale(blocks, 208)
    return codes.mul_(scales[..., None]).flatten(1)


_FORMULAS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
