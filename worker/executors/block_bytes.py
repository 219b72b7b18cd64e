"""Bytes of blocks: what a cache keeps of a block, or of a slot of states, in all layers, to be read and written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class BlockBytes:
    """A pool of blocks whose layers lie apart: one row of bytes for each block, its layers one after the other."""

    def __init__(self, layers: Sequence[Bytes]) -> None:
        """Takes the bytes of each layer [num_blocks, bytes of a block], as they lie in memory."""
        self._layers = [layer for layer in layers if layer.shape[1]]
        self.row_bytes = sum(layer.shape[1] for layer in self._layers)

    def read(self, block_ids: Sequence[int]) -> Bytes:
        """A copy of these blocks, [N, row_bytes]."""
        rows = np.empty((len(block_ids), self.row_bytes), dtype=np.uint8)
        for layer, part in self._parts(rows):
            np.copyto(part, layer[block_ids])
        return rows

    def write(self, block_ids: Sequence[int], rows: Bytes) -> None:
        """Puts rows [N, row_bytes] in place of what these blocks hold. The ids differ from each other."""
        for layer, part in self._parts(rows):
            layer[block_ids] = part

    def _parts(self, rows: Bytes) -> list[tuple[Bytes, Bytes]]:
        """Each layer, and its columns of the rows."""
        ends = np.cumsum([layer.shape[1] for layer in self._layers]).tolist()
        return [(layer, rows[:, end - layer.shape[1] : end]) for layer, end in zip(self._layers, ends, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """The caches of an executor, as far as they can be copied elsewhere and back."""

    blocks: BlockBytes
    form: str
    """Layout of rows: rows of equal forms mean the same."""
    states: BlockBytes | None = None
    """States, of a model that keeps them."""
    copy_states: Callable[[NDArray[np.int64]], None] | None = None
    """Copies slots [2, N], sources and destinations, one after the other."""
