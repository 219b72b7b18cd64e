"""KV cache on a GPU: for each attention layer of a rank a pool of keys and one of values, cut into blocks. Here is only
the memory, and the bytes of blocks, to be read and written, of any cache; a CPU's memory is `cpu/cache.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.executors.block_layout import BlockLayout, Bytes
from holdfast.worker.executors.row_places import RowPlaces
from holdfast.worker.model_info import TILE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Keys and values of one attention layer, and how they are read. Head counts are those of one rank."""

    num_heads: int
    """Query heads: a multiple of `num_kv_heads`."""
    num_kv_heads: int
    key_dim: int
    value_dim: int
    """0: values are dimensions of the keys (latent attention)."""
    sliding_window: int | None = None
    """A query sees itself and the `window` - 1 keys before it. None: all."""
    softcap: float | None = None
    has_sinks: bool = False
    first_kv_head: int = 0
    """Number of this rank's first KV head in the whole model."""

    @property
    def values_per_token(self) -> int:
        """Numbers kept for one token in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    @property
    def fp8_bytes_per_token(self) -> int:
        """Bytes in fp8: one each, and one for the scale of each row."""
        return self.values_per_token + 2 * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The pools of one layer, as views of the cache's memory."""

    spec: KVSpec
    keys: Tensor
    """[num_blocks, block_size, num_kv_heads, key_dim]"""
    values: Tensor
    """[num_blocks, block_size, num_kv_heads, value_dim]"""
    key_scales: Tensor | None = None
    """Scales in fp8, where the two above are uint8: [num_blocks, num_kv_heads, block_size], uint8; likewise of values.
    A tile of one head's keys reads neighbouring bytes."""
    value_scales: Tensor | None = None


class KVCache:
    """All layers' pools. They hold zeros until written; a block's memory is finite numbers at any time."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        pools: Sequence[Tensor],
        num_blocks: int,
        block_size: int,
        scale_pools: Sequence[Tensor] = (),
    ) -> None:
        """Use `allocate`. `pools` are the whole tensors, [pools, num_blocks, ...], that the layers are views of."""
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pools = tuple(pools)
        self._scale_pools = tuple(scale_pools)

    @classmethod
    def allocate(
        cls,
        specs: Sequence[KVSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        in_fp8: bool = False,
    ) -> "KVCache":
        """Pools for layers of these specs, in this order. With `in_fp8` they hold rows in 8 bits and their scales
        (`kv_cache.py`), and `dtype` is the dtype of reads.

        Raises ValueError unless `block_size` divides 64 or is a multiple of it.
        """
        if TILE_TOKENS % block_size and block_size % TILE_TOKENS:
            raise ValueError(f"block_size = {block_size}: must divide {TILE_TOKENS} or be a multiple of it")
        shapes = [(spec.num_kv_heads, dim) for spec in specs for dim in (spec.key_dim, spec.value_dim)]
        kept = torch.uint8 if in_fp8 else dtype
        pools = {
            shape: torch.zeros((shapes.count(shape), num_blocks, block_size, *shape), dtype=kept, device=device)
            for shape in dict.fromkeys(shapes)
        }
        counts = [spec.num_kv_heads for spec in specs for _ in range(2)] if in_fp8 else []
        scale_pools = {
            count: torch.zeros((counts.count(count), num_blocks, count, block_size), dtype=kept, device=device)
            for count in dict.fromkeys(counts)
        }
        unused = {shape: iter(pool) for shape, pool in pools.items()}
        unused_scales = {count: iter(pool) for count, pool in scale_pools.items()}
        layers = [
            LayerCache(
                spec,
                keys=next(unused[spec.num_kv_heads, spec.key_dim]),
                values=next(unused[spec.num_kv_heads, spec.value_dim]),
                key_scales=next(unused_scales[spec.num_kv_heads]) if in_fp8 else None,
                value_scales=next(unused_scales[spec.num_kv_heads]) if in_fp8 else None,
            )
            for spec in specs
        ]
        return cls(layers, list(pools.values()), num_blocks, block_size, list(scale_pools.values()))

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """All of its memory: tensors [pools, num_blocks, ...]."""
        return (*self._pools, *self._scale_pools)

    def want_all(self) -> None:
        """All of this memory is meant to be used. Nothing is done: it is there."""

    def take_late(self) -> None:
        """Nothing is taken ahead."""

    def copy(self, sources: Tensor, destinations: Tensor, num_tokens: Tensor) -> None:
        """Copies the first `num_tokens` [C] slots of blocks to other ones in all layers, and clears their other slots.

        All sources are read before any destination is written. The destinations differ from each other.
        """
        is_beyond = torch.arange(self.block_size, device=num_tokens.device) >= num_tokens[:, None]
        for pools, beyond in (
            (self._pools, is_beyond[:, :, None, None]),
            (self._scale_pools, is_beyond[:, None, :]),
        ):
            for pool in pools:
                pool.index_copy_(1, destinations, pool[:, sources].masked_fill_(beyond, 0))

    def clear(self, block_ids: Tensor) -> None:
        """Writes zeros over these blocks in all layers."""
        for pool in self.pools:
            pool.index_fill_(1, block_ids.to(pool.device), 0)


LARGEST: Final = 448.0
"""Largest e4m3."""

ROUNDS_TO_LARGEST: Final = 464.0
"""Largest number that rounds to `LARGEST`, ties to even."""

BROKEN: Final = 255
"""The scale of a row with NaN or infinity: e8m0's NaN."""

BIAS: Final = 127
"""Bias of e8m0: a scale's byte is its power of two plus this."""

MIN_POWER: Final = -127  # exponent of 2


def most_power(dtype: torch.dtype) -> int:
    """The largest power of two of a scale: so that `LARGEST` times it is a number of this dtype."""
    return 7 if dtype == torch.float16 else 119


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., n] of float32, bfloat16 or float16 -> codes [..., n] and scales [...], both uint8.

    The scale is the smallest power of two by which no element of the row exceeds e4m3, within 2^-127 and `most_power`.
    Elements are rounded to nearest, ties to even; those too large even so become the largest. A row with NaN or
    infinity is broken as a whole: then something notices it.
    """
    is_broken = ~x.isfinite().all(-1)
    exact = x.double().masked_fill(is_broken[..., None], 0.0)
    largest = exact.abs().amax(-1)
    fraction, power = torch.frexp(largest / ROUNDS_TO_LARGEST)  # in [0.5, 1): 2^power is the next power of two
    power = (power - (fraction == 0.5).int()).clamp(MIN_POWER, most_power(x.dtype))
    power = torch.where(largest == 0, MIN_POWER, power)
    scaled = (exact * _two_to(-power)[..., None]).clamp(-LARGEST, LARGEST)
    codes = scaled.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, torch.where(is_broken, BROKEN, power + BIAS).to(torch.uint8)


def decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers that rows are read as. Nothing of encoded rows of this dtype is rounded: where the grid of codes is finer
    than that of the dtype's smallest numbers, an element is one of them itself.
    """
    values = codes.view(torch.float8_e4m3fn).double()
    exact = values * _two_to(scales.int() - BIAS)[..., None]
    return exact.masked_fill((scales == BROKEN)[..., None], torch.nan).to(dtype)


def _two_to(power: Tensor) -> Tensor:
    """float64, exactly: `torch.ldexp` and `exp2` promise less."""
    return ((power.long() + 1023) << 52).view(torch.float64)


class BlockRows(Protocol):
    """Blocks as rows of bytes: those of a CPU's caches (`cpu/block_bytes.py`), or of a device."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a block."""
        ...

    def read(self, block_ids: Sequence[int]) -> Sequence[Bytes]:
        """A copy of these blocks, rows of `row_bytes`."""
        ...

    def read_into(self, block_ids: Sequence[int], places: RowPlaces) -> None:
        """Copies these blocks to places for rows of `row_bytes`, with their digests."""
        ...

    def write(self, block_ids: Sequence[int], rows: Sequence[Bytes]) -> None:
        """Overwrites the content of these blocks with rows of `row_bytes`. The ids differ from each other."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """The caches of an executor, as far as they can be copied elsewhere and back."""

    blocks: BlockRows
    form: str
    """Layout of rows: rows of equal forms mean the same."""
    layout: BlockLayout | None = None
    """Cut of `blocks`, where another replica's may be cut otherwise."""
    states: BlockRows | None = None
    """States, of a model that keeps them."""
    is_on_device: bool = False
    """The memory is that of a GPU."""
    copy_states: Callable[[NDArray[np.int64]], None] | None = None
    """Copies slots [2, N], sources and destinations, one after the other."""
