"""KV cache on CPUs: pages of tiles, as the native library's attention multiplies them. Here is only the memory."""

import ctypes
import errno
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.executors.block_bytes import BlockBytes, Bytes
from holdfast.worker.executors.cpu.packing import DTYPES
from holdfast.worker.executors.cpu.tile_memory import address_of, mapped_memory
from holdfast.worker.executors.kv_cache import KVSpec

LARGE_PAGE: Final = 2 << 20
AHEAD_BYTES: Final = 4 * LARGE_PAGE
"""Of each layer: what has its memory beyond the last block that a step has used, unless all of it is wanted."""
QUIET_S: Final = 0.02
"""A pause of steps that is longer than those between the steps of a burst."""

_MADV_POPULATE_WRITE: Final = 23


@dataclass(frozen=True, slots=True)
class Pages:
    """A layer's pages: `num_blocks` blocks of `block_bytes` each, one after the other."""

    memory: mmap.mmap
    num_blocks: int
    block_bytes: int

    def wanted(self, used: int, ahead_bytes: int) -> int:
        """Blocks to have ready, for so many bytes beyond those that are used."""
        return min(self.num_blocks, used - -ahead_bytes // self.block_bytes)


def populate(pages: Pages, begin: int, end: int) -> bool:
    """Backs the bytes [begin, end) with memory that can be written at once. Their contents stay as they are.

    False where this kernel (before Linux 5.14) or its memory does not allow it: then writes do it, as ever.
    """
    base = address_of(pages.memory)
    first = (base + begin) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    while libc.madvise(first, base + end - first, _MADV_POPULATE_WRITE):
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            return False
    return True


class KvPrefault:
    """A thread for the pages of all layers. Small caches have none."""

    def __init__(
        self,
        layers: Sequence[Pages],
        *,
        populate: Callable[[Pages, int, int], bool] = populate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layers = [layer for layer in layers if layer.num_blocks * layer.block_bytes > LARGE_PAGE]
        self._populate = populate
        self._clock = clock
        self._in_step = False
        self._last_step_s = clock()
        self._used = 0
        """Blocks up to the last one that a step has used."""
        self._ahead_bytes = AHEAD_BYTES
        self._more = threading.Event()
        self._closed = threading.Event()
        self.is_on = bool(self._layers)
        """Steps are told to it. To be read only."""
        if self._layers:
            self._more.set()
            threading.Thread(target=self._work, name="holdfast-memory-ahead", daemon=True).start()

    def want_all(self) -> None:
        """From now on the pages of all blocks are taken, while there are no steps."""
        self._ahead_bytes = max((layer.num_blocks * layer.block_bytes for layer in self._layers), default=0)
        self._more.set()

    def begin_step(self) -> None:
        """From now on the thread waits, but for a page that it has begun, and for pages that come soon."""
        self._in_step = True

    def end_step(self, last_block: int) -> None:
        """The step used blocks up to this one."""
        self._in_step = False
        self._last_step_s = self._clock()
        if last_block >= self._used:
            self._used = last_block + 1
            self._more.set()

    def close(self) -> None:
        """Ends the thread, after a page that it has begun: until then it holds the memory."""
        self._closed.set()
        self._more.set()

    def _work(self) -> None:
        done = [0] * len(self._layers)
        while True:
            self._more.wait()
            self._more.clear()
            while index := self._next(done):
                if not self._may_begin(done, index - 1) or not self._back_one(done, index - 1):
                    return
            if self._closed.is_set():
                return

    def _next(self, done: list[int]) -> int:
        """The number, from 1, of the layer that has fewest blocks ready and needs more. 0: all have enough."""
        lacking = [
            (blocks, number)
            for number, (layer, blocks) in enumerate(zip(self._layers, done, strict=True), 1)
            if blocks < layer.wanted(self._used, self._ahead_bytes)
        ]
        return 0 if self._closed.is_set() else min(lacking, default=(0, 0))[1]

    def _back_one(self, done: list[int], index: int) -> bool:
        layer = self._layers[index]
        end = min(layer.num_blocks, done[index] + max(1, LARGE_PAGE // layer.block_bytes))
        worked = self._populate(layer, done[index] * layer.block_bytes, end * layer.block_bytes)
        done[index] = end
        return worked

    def _may_begin(self, done: list[int], index: int) -> bool:
        """Waits until no step has run for a while, or the layer's next page is the last that it has. False: closed."""
        while self._is_busy() and done[index] >= self._layers[index].wanted(self._used, LARGE_PAGE):
            if self._closed.wait(QUIET_S):
                return False
        return not self._closed.is_set()

    def _is_busy(self) -> bool:
        return self._in_step or self._clock() - self._last_step_s < QUIET_S


SUB_PAGE: Final = 16
"""Keys of a tile: a block holds a whole number of them."""
MAX_HEAD_DIM: Final = 576
"""Dimensions of a key or a value (`native/pages.h`)."""
_SCALE_BYTES: Final = 2
"""float16."""


def bytes_per_token(spec: KVSpec, dtype: torch.dtype, *, in_int8: bool = False) -> int:
    """What the cache keeps of one token in one layer: keys are filled up to 32 dimensions, values to 16. In int8 a
    number takes a byte, and each key and each value two more for its scale.
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
    ) -> None:
        """Pages for layers of these specs, in this order, as `library` reads them: of numbers of `dtype`, or of codes
        and scales (`native/codes.h`).

        Raises ValueError unless `block_size` is a multiple of 16.
        """
        if block_size % SUB_PAGE:
            raise ValueError(f"block_size = {block_size}: must be a multiple of {SUB_PAGE}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.in_int8 = in_int8
        kept = torch.int8 if in_int8 else dtype
        places = _tile_places(library, torch.float32 if in_int8 else dtype)  # codes lie in lines, as float32 does
        self.span = 16 if block_size % 32 else 32
        """Keys of a tile of values."""
        self._layers = [_LayerPages(spec, num_blocks, block_size, kept, places, self.span) for spec in specs]
        self.ahead = KvPrefault([layer.memory for layer in self._layers])
        """Is told of each step."""
        self.bytes = BlockBytes([_rows(layer.memory) for layer in self._layers])
        """Its blocks, to be copied elsewhere and back."""
        self.form = f"{kept} {block_size} {blake2b(places.numpy().tobytes(), digest_size=8).hexdigest()} {specs}"
        """Names how bytes of a block are laid out: equal forms, equal meaning."""

    @property
    def addresses(self) -> list[int]:
        """Where each layer's pages begin."""
        return [layer.address for layer in self._layers]

    def parts(self, layer: int) -> tuple[Tensor, ...]:
        """A layer's keys, values and the bytes of scales, [block, head, ...] each, as they lie."""
        return self._layers[layer].parts()

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[None]:
        """Inside it, a step runs: its blocks are copied before, and no memory is taken ahead meanwhile."""
        if batch.block_copies.size:
            self.copy(*torch.from_numpy(batch.block_copies))
        self.ahead.begin_step()
        try:
            yield
        finally:
            self.ahead.end_step(int(batch.block_ids.max(initial=-1)))

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
    """[num_blocks, num_kv_heads, page]. A page has keys, values and, of int8, the bytes of scales: [2, block]."""

    def __init__(
        self, spec: KVSpec, num_blocks: int, block_size: int, kept: torch.dtype, places: Tensor, span: int
    ) -> None:
        block_bytes = block_size * bytes_per_token(spec, kept, in_int8=kept == torch.int8)
        elements = block_bytes // spec.num_kv_heads // kept.itemsize
        shape = (num_blocks, spec.num_kv_heads, elements)
        memory = mapped_memory(num_blocks * block_bytes)
        self.memory = Pages(memory, num_blocks, block_bytes)
        self.address = address_of(memory)
        count = num_blocks * spec.num_kv_heads * elements
        self.pages = torch.frombuffer(memory, dtype=kept, count=count).view(shape)
        keys_end = block_size * _whole(spec.key_dim, 32)
        self._ends = [keys_end, keys_end + block_size * _whole(spec.value_dim, 16)]
        self._block_size = block_size
        self._span = span
        at = torch.argsort(places.flatten())  # of each number of a tile: input * 16 + output
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
