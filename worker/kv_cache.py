"""The paged KV cache of one rank: per layer, one pool of keys and one of values.  [signatures first]"""

from collections.abc import Sequence
from dataclasses import dataclass
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """What one attention layer keeps and needs, on one rank (local head counts)."""

    num_heads: int
    """Query heads of this rank: a multiple of `num_kv_heads`."""
    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def values_per_token(self) -> int:
        raise NotImplementedError  # num_kv_heads * (key_dim + value_dim)


@dataclass(frozen=True, slots=True)
class LayerCache:
    spec: KVSpec
    keys: Tensor  # [num_blocks, block_size, num_kv_heads, key_dim]
    values: Tensor  # [num_blocks, block_size, num_kv_heads, value_dim]


class KVCache:
    layers: tuple[LayerCache, ...]
    num_blocks: int
    block_size: int

    @classmethod
    def allocate(
        cls, specs: Sequence[KVSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> "KVCache":
        """Zeroed pools. Raises ValueError unless block_size divides 64 or is a multiple of it."""
        raise NotImplementedError
