"""Keys and values in int8 in plain torch: the rule of `native/codes.h`, and where a cache's pages have them."""

from typing import Final

import torch
from torch import Tensor

from holdfast.worker.executors.cpu.cache import SUB_PAGE, TiledCache

LARGEST_CODE: Final = 127
LARGEST_SCALE: Final = 65504.0
"""Largest float16."""


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., n] of any float dtype -> codes [..., n], int8, and scales [...], float16.

    The scale is the row's largest magnitude / 127 in float32, rounded up to float16 and at most 65504; codes are
    x / scale, rounded to nearest, ties to even, within 127. A row of zeros has scale 0, one with NaN or infinity scale
    NaN and codes 0.
    """
    x = x.float()
    is_broken = ~x.isfinite().all(-1)
    least = x.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1) / LARGEST_CODE
    least = torch.where(least < torch.finfo(torch.float32).tiny, 0.0, least).clamp(max=LARGEST_SCALE)
    scales = least.half()
    above = (scales.view(torch.int16) + 1).view(torch.float16)
    scales = torch.where(scales.float() < least, above, scales)
    by = torch.where(scales == 0, 1.0, scales.float())
    codes = (x / by[..., None]).round().clamp(-LARGEST_CODE, LARGEST_CODE)
    codes = codes.masked_fill((is_broken | (scales == 0))[..., None], 0)
    return codes.to(torch.int8), scales.masked_fill(is_broken, torch.nan)


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Numbers that rows are read as: float32, in which they are exact."""
    return codes.float() * scales.float()[..., None]


def kept_rows(cache: TiledCache, layer: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Keys, then values of a layer of a cache in int8: codes [block, slot, head, dimension], filled up to tiles, and
    scales [block, slot, head].
    """
    keys, values, scales = cache.parts(layer)
    count, heads, block_size = len(keys), keys.shape[1], cache.block_size
    by_tile = keys.view(count, heads, block_size // SUB_PAGE, -1, 32, SUB_PAGE)
    key_codes = by_tile.permute(0, 2, 5, 1, 3, 4).reshape(count, block_size, heads, -1)
    span = cache.span
    by_span = values.view(count, heads, block_size // span, -1, span, 16)
    value_codes = by_span.permute(0, 2, 4, 1, 3, 5).reshape(count, block_size, heads, -1)
    key_scales, value_scales = scales.contiguous().view(torch.float16).view(count, heads, 2, block_size).unbind(2)
    return (key_codes, key_scales.mT), (value_codes, value_scales.mT)
