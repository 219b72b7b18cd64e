"""Bytes of blocks and states in a CPU's caches, to be copied elsewhere and back."""

from collections.abc import Callable, Sequence
from ctypes import CDLL
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.executors.block_layout import Bytes
from holdfast.worker.executors.cpu.checked_rows import LEAST_BYTES
from holdfast.worker.executors.row_places import RowPlaces


class BlockBytes:
    """A pool of blocks whose layers lie apart: one row of bytes for each block, its layers one after the other."""

    def __init__(self, layers: Sequence[Bytes], library: CDLL, on_write: Callable[[int], None] | None = None) -> None:
        """Takes the bytes of each layer [num_blocks, bytes of a block], as they lie in memory. `on_write` is told the
        last block that was written, each time.
        """
        self._layers = [layer for layer in layers if layer.shape[1]]
        assert all(layer.flags.c_contiguous for layer in self._layers), "blocks of a layer lie one after the other"
        self._library = library
        self._on_write = on_write
        self._num_blocks = min(len(layer) for layer in layers) if layers else None
        memories = np.array([(layer.ctypes.data, layer.shape[1]) for layer in self._layers], np.int64)
        self._memories = memories  # kept, since calls take its address
        self._of_layers = len(self._layers), memories.ctypes.data
        self.row_bytes = sum(layer.shape[1] for layer in self._layers)

    def read(self, block_ids: Sequence[int]) -> Sequence[Bytes]:
        """A copy of these blocks, rows of `row_bytes`."""
        rows = list(np.empty((len(block_ids), self.row_bytes), np.uint8))
        self._copy(block_ids, _addresses(rows), to_rows=True)
        return rows

    def read_into(self, block_ids: Sequence[int], places: RowPlaces) -> None:
        """Copies these blocks to places for rows of `row_bytes`, in one pass with their digests."""
        assert places.row_bytes == self.row_bytes, "whole rows"
        assert places.are_inside, "rows and digests in the memory"
        firsts = np.array(places.firsts, np.int64)
        if places.seeds is None:
            self._copy(block_ids, firsts + _address(places.memory), to_rows=True)
        elif self.row_bytes < LEAST_BYTES:
            places.fill(self.read(block_ids))
        else:
            ids, seeds = self._ids(block_ids, len(firsts)), np.array(places.seeds, np.uint64)
            self._library.native_copy_sealed(
                *(places.past_caches, *self._of_layers, len(ids), _address(ids)),
                *(_address(places.memory), _address(firsts), _address(seeds)),
            )

    def write(self, block_ids: Sequence[int], rows: Sequence[Bytes]) -> None:
        """Overwrites the content of these blocks with rows of `row_bytes`. The ids differ from each other."""
        assert all(row.nbytes == self.row_bytes and row.flags.c_contiguous for row in rows), "whole rows"
        self._copy(block_ids, _addresses(rows), to_rows=False)
        if self._on_write is not None and block_ids:
            self._on_write(max(block_ids))

    def _copy(self, block_ids: Sequence[int], addresses: NDArray[np.int64], *, to_rows: bool) -> None:
        ids = self._ids(block_ids, len(addresses))
        self._library.native_copy_blocks(to_rows, *self._of_layers, len(ids), _address(ids), _address(addresses))

    def _ids(self, block_ids: Sequence[int], num_rows: int) -> NDArray[np.int64]:
        ids = np.array(block_ids, np.int64)
        assert len(ids) == num_rows, "a row for each block"
        assert self._num_blocks is None or max(block_ids, default=-1) < self._num_blocks, "blocks of this pool"
        assert min(block_ids, default=0) >= 0, "blocks of this pool"
        return ids


def _addresses(rows: Sequence[Bytes]) -> NDArray[np.int64]:
    return np.array([_address(row) for row in rows], np.int64)


def _address(memory: NDArray[Any]) -> int:
    """`memory.ctypes.data`, which takes thrice the time."""
    address: int = memory.__array_interface__["data"][0]
    return address
