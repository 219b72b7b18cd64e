"""KV cache of the native executor: pages of tiles, as its attention multiplies them.

Here is only the memory, as in `worker/attention/kv_cache.py`. What may not live here: which block belongs to which
sequence, and what reads and writes the pages (`native/attention.h`, `native/step.h`).
"""

from typing import Final

import torch
from torch import Tensor

from holdfast.worker.decoder.cpu.arena import address_of, mapped_memory
from holdfast.worker.decoder.cpu.memory_ahead import MemoryAhead, Pages
from holdfast.worker.decoder.cpu.packing import elements_per_token
from holdfast.worker.decoder.cpu.structures import HfLayer

SUB_PAGE: Final = 16
"""Keys of a tile: a block holds a whole number of them."""


class TiledCache:
    """All layers' pages. They hold zeros until written; a block's memory is finite numbers at any time."""

    def __init__(
        self, layers: "list[HfLayer]", num_blocks: int, block_size: int, dtype: torch.dtype, places: Tensor
    ) -> None:
        """`places` [32 inputs, 16 outputs]: where each number lies in a tile (`tile_places`).

        Raises ValueError unless `block_size` is a multiple of 16.
        """
        if block_size % SUB_PAGE:
            raise ValueError(f"block_size = {block_size}: must be a multiple of {SUB_PAGE}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers = [_LayerPages(layer, num_blocks, block_size, dtype, places) for layer in layers]
        self.ahead = MemoryAhead([layer.memory for layer in self._layers])
        """Is told of each step."""

    @property
    def addresses(self) -> list[int]:
        """Where each layer's pages begin."""
        return [layer.address for layer in self._layers]

    def want_all(self) -> None:
        """All of this memory is meant to be used: it is taken from the system while no step runs."""
        self.ahead.want_all()

    def close(self) -> None:
        """No step comes any more."""
        self.ahead.close()

    def copy(self, sources: Tensor, destinations: Tensor, num_tokens: Tensor) -> None:
        """Copies the first `num_tokens` [C] slots of blocks to other ones in all layers, and clears their other slots.

        All sources are read before any destination is written. The destinations differ from each other.
        """
        for layer in self._layers:
            layer.copy(sources, destinations, num_tokens)

    def clear(self, block_ids: Tensor) -> None:
        """Writes zeros over these blocks in all layers."""
        for layer in self._layers:
            layer.pages.index_fill_(0, block_ids, 0)


class _LayerPages:
    """[num_blocks, num_kv_heads, page]."""

    def __init__(self, layer: HfLayer, num_blocks: int, block_size: int, dtype: torch.dtype, places: Tensor) -> None:
        elements = elements_per_token(layer) // layer.num_kv_heads * block_size
        shape = (num_blocks, layer.num_kv_heads, elements)
        block_bytes = layer.num_kv_heads * elements * dtype.itemsize
        memory = mapped_memory(num_blocks * block_bytes)
        self.memory = Pages(memory, num_blocks, block_bytes)
        self.address = address_of(memory)
        count = num_blocks * layer.num_kv_heads * elements
        self.pages = torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
        self._num_keys = block_size * -(-layer.head_dim // 32) * 32
        self._block_size = block_size
        self._span = 16 if block_size % 32 else 32
        at = torch.argsort(places.flatten())  # of each number of a tile: input * 16 + output
        self._key_of_key_tile = at % SUB_PAGE
        self._key_of_value_tile = at[: self._span * 16] // 16

    def copy(self, sources: Tensor, destinations: Tensor, num_tokens: Tensor) -> None:
        moved = self.pages[sources]
        hidden = torch.arange(self._block_size) >= num_tokens[:, None]
        keys, values = (part.contiguous() for part in moved.tensor_split([self._num_keys], dim=2))
        self._hide_keys(keys, hidden)
        self._hide_values(values, hidden)
        self.pages.index_copy_(0, destinations, torch.cat([keys, values], dim=2))

    def _hide_keys(self, keys: Tensor, hidden: Tensor) -> None:
        """keys [C, heads, block / 16, tiles of dimensions, a tile], hidden [C, block]."""
        by_page = hidden.view(len(hidden), -1, SUB_PAGE)[..., self._key_of_key_tile]
        pages = keys.view(*keys.shape[:2], by_page.shape[1], -1, by_page.shape[2])
        pages.masked_fill_(by_page[:, None, :, None], 0)

    def _hide_values(self, values: Tensor, hidden: Tensor) -> None:
        """values [C, heads, block / span, tiles of dimensions, a tile of `span` keys], hidden [C, block]."""
        by_span = hidden.view(len(hidden), -1, self._span)[..., self._key_of_value_tile]
        values.view(*values.shape[:2], by_span.shape[1], -1, by_span.shape[2]).masked_fill_(
            by_span[:, None, :, None], 0
        )
