"""Proof at load for keys and values in int8: this machine's library stores and reads them by the rule.

Equality in every bit: of codes and scales with plain torch's, and of attention over rows whose scales are powers of
two with attention over the same numbers in the model's dtype. What int8 costs of a model's accuracy is no part of it.
"""

from collections.abc import Sequence
from ctypes import CDLL
from typing import Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.cpu.cache import SUB_PAGE, TiledCache
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.cpu.products import LayerAttention
from holdfast.worker.executors.kv_cache import KVSpec
from holdfast.worker.executors.step_batch import StepBatch

INT8_NUMERICS: Final = "kv-int8-1"
"""Names the format and its roundings. A change that changes any bit of any output takes the next number."""

_TOKENS, _BLOCK = 70, 16
_SCALING: Final = 0.02  # of the products of queries and keys


def int8_difference(specs: Sequence[KVSpec], dtype: torch.dtype, library: CDLL) -> str | None:
    """Difference in a layer of each kind; None: none."""
    pool = NativePool(1, library)
    for spec in dict.fromkeys(specs):
        what = _difference(spec, dtype, pool)
        if what is not None:
            return f"{what} in int8, of a layer with {spec.num_kv_heads} KV heads, differ from the reference"
    return None


def _difference(spec: KVSpec, dtype: torch.dtype, pool: NativePool) -> str | None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(spec.num_heads, _TOKENS, spec.key_dim, generator=generator).to(dtype)
    dims = spec.key_dim, spec.value_dim
    key, value = (_any_rows(spec.num_kv_heads, dim, generator).to(dtype) for dim in dims)
    cache, _ = _attended(spec, dtype, pool, (query, key, value), in_int8=True)
    for name, rows, (codes, scales) in zip(("keys", "values"), (key, value), kept_rows(cache, 0), strict=True):
        expected_codes, expected_scales = encoded(rows.transpose(0, 1))  # by token and head
        found = codes.flatten(0, 1)[:_TOKENS, :, : rows.shape[2]]
        if not torch.equal(found, expected_codes) or not torch.equal(scales.flatten(0, 1)[:_TOKENS], expected_scales):
            return name
    key, value = (_exact_rows(spec.num_kv_heads, dim, generator).to(dtype) for dim in dims)
    (_, found), (_, expected) = (
        _attended(spec, dtype, pool, (query, key, value), in_int8=in_int8) for in_int8 in (True, False)
    )
    return None if torch.equal(found, expected) else "scores"


def _any_rows(num_heads: int, dim: int, generator: torch.Generator) -> Tensor:
    """[heads, tokens, dim] of many magnitudes."""
    powers = torch.randint(-12, 8, (num_heads, _TOKENS, 1), generator=generator)
    return torch.randn(num_heads, _TOKENS, dim, generator=generator) * torch.exp2(powers.float())


def _exact_rows(num_heads: int, dim: int, generator: torch.Generator) -> Tensor:
    """[heads, tokens, dim] that eight bits hold: whole numbers up to 127, which is among them, times a power of two."""
    numbers = torch.randint(-LARGEST_CODE, LARGEST_CODE + 1, (num_heads, _TOKENS, dim), generator=generator)
    numbers[..., 0] = LARGEST_CODE
    powers = torch.randint(-8, -4, (num_heads, _TOKENS, 1), generator=generator)
    return numbers * torch.exp2(powers.float())


def _attended(
    spec: KVSpec, dtype: torch.dtype, pool: NativePool, rows: tuple[Tensor, Tensor, Tensor], *, in_int8: bool
) -> tuple[TiledCache, Tensor]:
    """A cache with the keys and values of one sequence, and what its queries come to."""
    num_blocks = -(-_TOKENS // _BLOCK)
    cache = TiledCache([spec], num_blocks, _BLOCK, dtype, pool.library, in_int8=in_int8)
    attention = LayerAttention(pool, [spec], cache, dtype)
    attention.begin(_batch(num_blocks))
    output = attention.attend(0, *rows, _SCALING, None)
    attention.close()
    cache.close()
    return cache, output


def _batch(num_blocks: int) -> StepBatch:
    return StepBatch(
        step_id=0,
        token_ids=np.zeros(_TOKENS, dtype=np.int64),
        first_positions=np.zeros(1, dtype=np.int64),
        num_tokens=np.array([_TOKENS]),
        num_draws=np.zeros(1, dtype=np.int64),
        block_ids=np.arange(num_blocks),
        num_blocks=np.array([num_blocks]),
        block_copies=np.zeros((3, 0), dtype=np.int64),
        logits_rows=np.zeros(0, dtype=np.int64),
    )


LARGEST_CODE: Final = 127  # of int8, symmetric
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
