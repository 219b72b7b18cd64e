"""Bytes of blocks and states in a CPU's caches, to be copied elsewhere and back."""

from collections.abc import Callable, Sequence
from ctypes import CDLL

import numpy as np

from holdfast.worker.executors.block_layout import Bytes


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
        self._memories = np.array([(layer.ctypes.data, layer.shape[1]) for layer in self._layers], np.int64)
        self.row_bytes = sum(layer.shape[1] for layer in self._layers)

    def read(self, block_ids: Sequence[int], into: Sequence[Bytes] | None = None) -> Sequence[Bytes]:
        """A copy of these blocks, rows of `row_bytes`; `into`: where it is made."""
        rows = list(np.empty((len(block_ids), self.row_bytes), np.uint8)) if into is None else into
        self._copy(block_ids, rows, to_rows=True)
        return rows

    def write(self, block_ids: Sequence[int], rows: Sequence[Bytes]) -> None:
        """Overwrites the content of these blocks with rows of `row_bytes`. The ids differ from each other."""
        self._copy(block_ids, rows, to_rows=False)
        if self._on_write is not None and block_ids:
            self._on_write(max(block_ids))

    def _copy(self, block_ids: Sequence[int], rows: Sequence[Bytes], *, to_rows: bool) -> None:
        ids = np.array(block_ids, np.int64)
        assert len(ids) == len(rows), "a row for each block"
        assert self._num_blocks is None or all(0 <= one < self._num_blocks for one in block_ids), "blocks of this pool"
        assert all(row.nbytes == self.row_bytes and row.flags.c_contiguous for row in rows), "whole rows"
        addresses = np.array([row.ctypes.data for row in rows], np.int64)
        self._library.native_copy_blocks(
            to_rows, len(self._layers), self._memories.ctypes.data, len(ids), ids.ctypes.data, addresses.ctypes.data
        )
