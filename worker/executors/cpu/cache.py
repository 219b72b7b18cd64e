"""KV cache on CPUs: pages of tiles, as the native library's attention multiplies them. Here is only the memory."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.block_layout import UNIT, BlockLayout, Bytes, PageForm
from holdfast.worker.executors.cpu.block_bytes import BlockBytes
from holdfast.worker.executors.cpu.prefault import KvPrefault, Pages
from holdfast.worker.executors.cpu.tile_memory import address_of
from holdfast.worker.executors.cpu.weight_codes import DTYPES
from holdfast.worker.executors.kv_cache import BlockMemory, KVSpec
from holdfast.worker.executors.step_batch import IntArray, StepBatch
from holdfast.worker.model_info import TILE_TOKENS, Window

SUB_PAGE: Final = 16
"""Keys of a tile: a block holds a whole number of them."""
MAX_HEAD_DIM: Final = 576
"""Dimensions of a key or a value (`native/pages.h`)."""
KEPT_AS_INT8: Final = 1
"""`kept_as` of the C structures: keys and values are codes; 0: numbers of the model's dtype."""

_SCALE_BYTES: Final = 2
"""float16."""


def bytes_per_token(spec: KVSpec, dtype: torch.dtype, *, in_int8: bool = False) -> int:
    """Bytes of one token in one layer of the cache: keys are padded to 32 dimensions, values to 16. In int8 a number
    takes a byte, and each key and each value two more for its scale.
    """
    numbers = spec.num_kv_heads * (_whole(spec.key_dim, 32) + _whole(spec.value_dim, 16))
    return numbers + 2 * _SCALE_BYTES * spec.num_kv_heads if in_int8 else numbers * dtype.itemsize


def _rows(pages: Pages) -> Bytes:
    """[num_blocks, block_bytes]"""
    return np.frombuffer(pages.memory, np.uint8, pages.num_blocks * pages.block_bytes).reshape(
        pages.num_blocks, pages.block_bytes
    )


def _whole(count: int, of: int) -> int:
    return -(-count // of) * of


def span_of(block_size: int) -> int:
    """Keys of a tile of values."""
    return 16 if block_size % 32 else 32


def _tile_places(library: CDLL, dtype: torch.dtype) -> Tensor:
    """[32 inputs, 16 outputs]: where each number lies in a tile of packed weights, keys or values."""
    places = torch.empty(32, 16, dtype=torch.int16)
    library.native_places(DTYPES[dtype], places.data_ptr())
    return places.long()


class TiledCache:
    """All layers' pages. They hold zeros until written; a block's memory is finite numbers at any time."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        library: CDLL,
        *,
        in_int8: bool = False,
        window: Window | None = None,
    ) -> None:
        """Pages for layers of these specs, in this order, as `library` reads them: of numbers of `dtype`, or of codes
        and scales (`native/codes.h`). With a `window`, layers with a sliding window have separate blocks, in the same
        memory: a block holds pages either of all other layers, or of the window layers.

        Raises ValueError unless `block_size` is a multiple of 16.
        """
        if block_size % SUB_PAGE or (window is not None and window.block_size % SUB_PAGE):
            raise ValueError(f"block_size = {block_size}: must be a multiple of {SUB_PAGE}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.in_int8 = in_int8
        kept = torch.int8 if in_int8 else dtype
        places = _tile_places(library, torch.float32 if in_int8 else dtype)  # codes lie in lines, as float32 does
        self.span = span_of(block_size)
        """Keys of a tile of values."""
        form = _PageForm(kept, places)
        self.window = window
        self._in_window = [window is not None and spec.sliding_window is not None for spec in specs]
        if window is None:
            memories = [Pages.mapped(num_blocks, _block_bytes(spec, block_size, kept)) for spec in specs]
            self._layers = [
                _LayerPages(spec, block_size, form, memory, 0) for spec, memory in zip(specs, memories, strict=True)
            ]
        else:
            memories, self._layers = _in_one_memory(specs, num_blocks, block_size, form, window)
        self._memories = memories
        self.ahead = KvPrefault(memories)
        """Follows the steps, and blocks that come from elsewhere."""
        self.bytes = BlockBytes([_rows(memory) for memory in memories], library, self.ahead.note_use)
        """Blocks, to be copied elsewhere and back."""
        order = blake2b(places.numpy().tobytes(), digest_size=8).hexdigest()
        self.form = f"{kept} {block_size} {order} {specs}"
        """Names how bytes of a block are laid out: equal forms, equal meaning."""
        self._layout = BlockLayout(
            numbers=f"{kept} {order}".removeprefix("torch."),
            pages=tuple(_page_form(spec, kept) for spec in specs),
            block_size=block_size,
            heads=tuple(tuple(range(one.first_kv_head, one.first_kv_head + one.num_kv_heads)) for one in specs),
        )

    @property
    def addresses(self) -> list[int]:
        """Address of each layer's pages."""
        return [layer.address for layer in self._layers]

    @property
    def tables(self) -> list[tuple[int, int, bool]]:
        """For each layer: tokens of a block, bytes from a block to the next, and whether its blocks are those of layers
        with a window.
        """
        return [
            (layer.block_size, layer.stride_bytes, in_window)
            for layer, in_window in zip(self._layers, self._in_window, strict=True)
        ]

    @property
    def block_memory(self) -> BlockMemory:
        """The blocks, to be copied between two steps."""
        layout = self._layout if self.window is None else None
        return BlockMemory(blocks=self.bytes, form=self.form, layout=layout)

    def parts(self, layer: int) -> tuple[Tensor, ...]:
        """A layer's keys, values and the bytes of scales, [block, head, ...] each, as they lie."""
        return self._layers[layer].parts()

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[None]:
        """Inside it, a step runs: its blocks are copied before, and no memory is taken ahead meanwhile."""
        self.copy_for(batch)
        self.ahead.begin_step()
        try:
            yield
        finally:
            self.ahead.end_step(last_block(batch))

    def copy_for(self, batch: StepBatch) -> None:
        """The copies of blocks that a step makes before it computes."""
        if batch.block_copies.size:
            self.copy(*torch.from_numpy(batch.block_copies))
        if batch.window_copies.size:
            self._copy(*torch.from_numpy(batch.window_copies), in_window=True)

    def want_all(self) -> None:
        """All of this memory is meant to be used: it is taken from the system while no step runs."""
        self.ahead.want_all()

    def give_back(self, block_ids: IntArray) -> None:
        """Returns the memory of these blocks, ascending, to the system, because states take their place: their content
        is lost.
        """
        for memory in self._memories:
            memory.give_back(block_ids)

    def take_late(self) -> None:
        """Takes memory where it is written to and never ahead: states may be in its place."""
        self.ahead.close()

    def close(self) -> None:
        """No further step comes."""
        self.ahead.close()

    def copy(self, sources: Tensor, destinations: Tensor, num_tokens: Tensor) -> None:
        """Copies the first `num_tokens` [C] slots of blocks to other ones in all layers, except window layers with
        separate blocks, and clears their other slots.

        All sources are read before any destination is written. The destinations differ from each other.
        """
        self._copy(sources, destinations, num_tokens, in_window=False)

    def _copy(self, sources: Tensor, destinations: Tensor, num_tokens: Tensor, *, in_window: bool) -> None:
        for layer, is_there in zip(self._layers, self._in_window, strict=True):
            if is_there == in_window:
                layer.copy(sources, destinations, num_tokens)

    def clear(self, block_ids: Tensor) -> None:
        """Writes zeros over these blocks in all layers."""
        for layer in self._layers:
            layer.pages.index_fill_(0, block_ids, 0)


def last_block(batch: StepBatch) -> int:
    """The largest id in the tables of a step; -1 if there is none."""
    return max(int(ids.max(initial=-1)) for ids in (batch.block_ids, batch.window_block_ids))


MAX_TIMES_LARGER: Final = 16
"""A block of layers that see all, than one of layers with a window, or the other way round."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Form in which a cache is cut into blocks: the keys and values of its layers, and their number format."""

    specs: Sequence[KVSpec]
    dtype: torch.dtype
    in_int8: bool = False

    @property
    def bytes_per_token(self) -> int:
        """All layers together."""
        return sum(self._bytes_of_token(spec) for spec in self.specs)

    def sizes(self, block_size: int, max_model_len: int) -> tuple[int, Window | None]:
        """Tokens of a block, and the separate blocks of layers with a sliding window, for sequences of at most this
        many tokens. None: they keep as much as the others.

        A block takes nearly the same memory for both kinds of layers: one kind has several times the tokens of the
        other in a block, by the layers' bytes per token. The other has `block_size`.
        """
        windows = [spec.sliding_window for spec in self.specs if spec.sliding_window is not None]
        if len(windows) in (0, len(self.specs)) or max(windows) + TILE_TOKENS + block_size >= max_model_len:
            return block_size, None
        of_windows = sum(self._bytes_of_token(spec) for spec in self.specs if spec.sliding_window is not None)
        of_all = self.bytes_per_token - of_windows
        times = min(MAX_TIMES_LARGER, max(1, round(max(of_all, of_windows) / min(of_all, of_windows))))
        larger = block_size * times
        sizes = (larger, block_size) if of_windows >= of_all else (block_size, larger)
        return sizes[0], Window.beside(sizes[0], max(windows), sizes[1])

    def block_bytes(self, block_size: int, window: Window | None) -> int:
        """Memory of a block: of all layers; with a `window`, of the full-attention layers or of the window layers,
        whichever is more.
        """
        if window is None:
            return block_size * self.bytes_per_token
        of_windows = sum(self._bytes_of_token(spec) for spec in self.specs if spec.sliding_window is not None)
        of_all = self.bytes_per_token - of_windows
        return _whole(max(of_all * block_size, of_windows * window.block_size), math.lcm(64, block_size))

    def _bytes_of_token(self, spec: KVSpec) -> int:
        return bytes_per_token(spec, self.dtype, in_int8=self.in_int8)


def _page_form(spec: KVSpec, kept: torch.dtype) -> PageForm:
    tiles = _whole(spec.value_dim, SUB_PAGE) // SUB_PAGE
    return PageForm(
        keys=UNIT * _whole(spec.key_dim, 32) * kept.itemsize,
        values=UNIT * tiles * SUB_PAGE * kept.itemsize,
        value_tiles=tiles,
        scale=_SCALE_BYTES if kept == torch.int8 else 0,
    )


def _block_bytes(spec: KVSpec, block_size: int, kept: torch.dtype) -> int:
    return block_size * bytes_per_token(spec, kept, in_int8=kept == torch.int8)


@dataclass(frozen=True, slots=True)
class _PageForm:
    """Layout of numbers in tiles."""

    kept: torch.dtype
    places: Tensor
    """[32 inputs, 16 outputs]: where each number lies in a tile."""


def _in_one_memory(
    specs: Sequence[KVSpec], num_blocks: int, block_size: int, form: _PageForm, window: Window
) -> tuple[list[Pages], list["_LayerPages"]]:
    """Each layer's place in blocks of one memory, for layers with a window from the beginning of a block as well."""
    blocks = BlockForm(specs, form.kept, in_int8=form.kept == torch.int8)
    memory = Pages.mapped(num_blocks, blocks.block_bytes(block_size, window))
    layers, places = [], [0, 0]
    for spec in specs:
        in_window = spec.sliding_window is not None
        size = window.block_size if in_window else block_size
        layers.append(_LayerPages(spec, size, form, memory, places[in_window]))
        places[in_window] += _block_bytes(spec, size, form.kept)
    return [memory], layers


class _LayerPages:
    """[num_blocks, num_kv_heads, page]. A page has keys, values and, of int8, the bytes of scales: [2, block]."""

    def __init__(self, spec: KVSpec, block_size: int, form: _PageForm, memory: Pages, offset: int) -> None:
        """Takes blocks of a memory, from a byte of each on."""
        kept = form.kept
        self.memory, self.block_size, self.stride_bytes = memory, block_size, memory.block_bytes
        self.address = address_of(memory.memory) + offset
        elements = _block_bytes(spec, block_size, kept) // spec.num_kv_heads // kept.itemsize
        stride = self.stride_bytes // kept.itemsize
        numbers = torch.frombuffer(memory.memory, dtype=kept, count=memory.num_blocks * stride)
        shape = (memory.num_blocks, spec.num_kv_heads, elements)
        self.pages = numbers.as_strided(shape, (stride, elements, 1), offset // kept.itemsize)
        keys_end = block_size * _whole(spec.key_dim, 32)
        self._ends = [keys_end, keys_end + block_size * _whole(spec.value_dim, 16)]
        self._block_size = block_size
        self._span = span_of(block_size)
        at = torch.argsort(form.places.flatten())  # of each number of a tile: input * 16 + output
        self._key_of_key_tile = at % SUB_PAGE
        self._key_of_value_tile = at[: self._span * 16] // 16

    def copy(self, sources: Tensor, destinations: Tensor, num_tokens: Tensor) -> None:
        moved = self.pages[sources]
        hidden = torch.arange(self._block_size) >= num_tokens[:, None]
        keys, values, scales = (part.contiguous() for part in self._parts(moved))
        self._hide_keys(keys, hidden)
        self._hide_values(values, hidden)
        if scales.shape[2]:
            by_token = scales.view(*scales.shape[:2], 2, self._block_size, _SCALE_BYTES)
            by_token.masked_fill_(hidden[:, None, None, :, None], 0)
        self.pages.index_copy_(0, destinations, torch.cat([keys, values, scales], dim=2))

    def parts(self) -> tuple[Tensor, ...]:
        """Keys, values and the bytes of scales, of all blocks and heads."""
        return self._parts(self.pages)

    def _parts(self, pages: Tensor) -> tuple[Tensor, ...]:
        return pages.tensor_split(self._ends, dim=2)

    def _hide_keys(self, keys: Tensor, hidden: Tensor) -> None:
        """keys [C, heads, block / 16, tiles of dimensions, a tile], hidden [C, block]."""
        by_page = hidden.view(len(hidden), -1, SUB_PAGE)[..., self._key_of_key_tile]
        pages = keys.view(*keys.shape[:2], by_page.shape[1], -1, by_page.shape[2])
        pages.masked_fill_(by_page[:, None, :, None], 0)

    def _hide_values(self, values: Tensor, hidden: Tensor) -> None:
        """values [C, heads, block / span, tiles of dimensions, a tile of `span` keys], hidden [C, block]."""
        by_span = hidden.view(len(hidden), -1, self._span)[..., self._key_of_value_tile]
        if not values.numel():
            return
        values.view(*values.shape[:2], by_span.shape[1], -1, by_span.shape[2]).masked_fill_(
            by_span[:, None, :, None], 0
        )
