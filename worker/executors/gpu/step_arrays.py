"""Arrays of a step for the GPU executor: a step batch as one int32 array, copied at once into buffers that stay.

[token ids | positions | slots | wanted rows | narrow tiles | wide tiles | block tables]
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.executors.gpu.graphs import Staging, StepWait
from holdfast.worker.executors.gpu.launches import SPLIT_KEYS, AttentionTiles, StepTensors
from holdfast.worker.executors.step_batch import StepBatch

Int32Array = NDArray[np.int32]

NARROW: Final = 16  # the fewest that tl.dot takes
WIDE: Final = 32
"""Columns of a query tile: for decoding and verification, and for chunks of prompts."""


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """The query tiles of a batch."""

    narrow: Int32Array
    """[tiles, 3]: first row, rows, sequence"""
    wide: Int32Array
    narrow_splits: int
    """Splits of the longest context of a narrow tile; likewise of a wide one."""
    wide_splits: int


_WIDE_DIMS: Final = 128
"""Heads of more dimensions leave no registers for a wide tile."""


def tile_columns(group: int, head_dim: int) -> tuple[int, int]:
    """Columns of a narrow and of a wide tile, where `group` query heads share a KV head."""
    power = 1 << (group - 1).bit_length()
    return max(NARROW, power), max(WIDE if head_dim <= _WIDE_DIMS else NARROW, power)


def query_tiles(batch: StepBatch, columns: tuple[int, int], group: int) -> QueryTiles:
    """Cuts the rows of each sequence: the rows of a sequence that fits go into a narrow tile, others into wide ones."""
    narrow, wide = columns[0] // group, columns[1] // group
    counts, ends = batch.num_tokens, batch.first_positions + batch.num_tokens
    starts = np.cumsum(counts) - counts
    is_narrow = counts <= narrow
    sequences = np.flatnonzero(is_narrow)
    tiles = np.stack((starts[is_narrow], counts[is_narrow], sequences), 1).astype(np.int32)
    cut = [
        (start + first, min(wide, count - first), sequence)
        for sequence in np.flatnonzero(~is_narrow).tolist()
        for start, count in ((int(starts[sequence]), int(counts[sequence])),)
        for first in range(0, count, wide)
    ]
    return QueryTiles(
        narrow=tiles,
        wide=np.array(cut, dtype=np.int32).reshape(-1, 3),
        narrow_splits=-(-int(ends[is_narrow].max(initial=0)) // SPLIT_KEYS),
        wide_splits=-(-int(ends[~is_narrow].max(initial=0)) // SPLIT_KEYS),
    )


class StepArrays:
    """Buffers of fixed size and place for steps of at most `max_rows` tokens."""

    def __init__(
        self, max_rows: int, max_blocks: int, group: int, head_dim: int, device: torch.device, wait: StepWait
    ) -> None:
        """`max_blocks`: blocks of the longest sequence. `group`: query heads of a KV head, `head_dim`: the largest."""
        self.max_rows = max_rows
        self._max_blocks = max_blocks
        self._group = group
        self._columns = tile_columns(group, head_dim)
        size = 10 * max_rows + max_rows * max_blocks
        self._staging = Staging(size, device, wait)
        self._on_device = torch.zeros(size, dtype=torch.int32, device=device)

    @property
    def wanted(self) -> Tensor:
        """[max rows]: the rows whose logits are wanted."""
        return self._on_device[3 * self.max_rows : 4 * self.max_rows]

    def fill(self, batch: StepBatch, num_rows: int, tiles: QueryTiles, block_size: int) -> None:
        """Writes a step, padded to `num_rows` rows and the same number of narrow tiles and wanted rows, and copies
        it.
        """
        count, rows = len(batch.token_ids), self.max_rows
        flat = self._staging.free().numpy()
        flat[: 10 * rows].reshape(10, rows)[:, :num_rows] = 0
        flat[:count] = batch.token_ids
        positions = batch.positions
        flat[rows : rows + count] = positions
        flat[2 * rows : 2 * rows + num_rows] = -1
        sequence_of_row = np.repeat(np.arange(len(batch.num_tokens)), batch.num_tokens)
        blocks = batch.blocks_of(sequence_of_row, positions // block_size)
        flat[2 * rows : 2 * rows + count] = blocks * block_size + positions % block_size
        flat[3 * rows : 3 * rows + len(batch.logits_rows)] = batch.logits_rows
        flat[4 * rows : 4 * rows + 3 * num_rows] = 0
        flat[4 * rows : 4 * rows + tiles.narrow.size] = tiles.narrow.reshape(-1)
        flat[7 * rows : 7 * rows + tiles.wide.size] = tiles.wide.reshape(-1)
        end = 10 * rows + self._fill_tables(flat[10 * rows :], batch)
        self._staging.copy(self._on_device[:end])

    def tensors(self, num_rows: int, num_narrow: int, num_wide: int, splits: tuple[int, int]) -> StepTensors:
        """The step as the kernels read it: views of the buffers, the same for the same numbers."""
        rows, flat = self.max_rows, self._on_device
        tables = flat[10 * rows :].view(rows, self._max_blocks)
        kinds = (
            AttentionTiles(flat[4 * rows : 4 * rows + 3 * num_narrow].view(-1, 3), self._columns[0], splits[0]),
            AttentionTiles(flat[7 * rows : 7 * rows + 3 * num_wide].view(-1, 3), self._columns[1], splits[1]),
        )
        return StepTensors(
            token_ids=flat[:num_rows],
            positions=flat[rows : rows + num_rows],
            slots=flat[2 * rows : 2 * rows + num_rows],
            tables=tables,
            tiles=tuple(kind for kind in kinds if len(kind.table)),
        )

    def tiles_of(self, batch: StepBatch) -> QueryTiles:
        return query_tiles(batch, self._columns, self._group)

    def _fill_tables(self, flat: Int32Array, batch: StepBatch) -> int:
        """Writes the block tables one under the other. Returns the count of numbers."""
        counts, width = batch.num_blocks, self._max_blocks
        starts = np.arange(len(counts)) * width - (np.cumsum(counts) - counts)
        flat[np.repeat(starts, counts) + np.arange(len(batch.block_ids))] = batch.block_ids
        return len(counts) * width
