"""Query tiles: which queries of a step are computed together over which keys, independently of batch and chunking.

Positions are cut into tiles of 64. A query at position p reads the keys up to the end of its own tile, masked beyond p;
with a sliding window of w it starts at the tile that holds the first key its tile's first query sees. So the number of
keys that a kernel walks for a query, and where they lie, is a function of p alone.

    positions   0         64        128       192
    queries                         [ . q q ]            a chunk, 130 to 131
    keys        [ k k k k k k k k k k k k k k ]          0 to 191: what is beyond each query is masked

The query heads that share a key-value head are laid out as rows of one tile, token by token, and the rows are padded to
a size that the row rule allows. Tiles of equal shape share a call, whichever sequences they belong to. All of this is
numpy, made once per step for all layers of a kind.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.worker.distributed.step_batch import IntArray, StepBatch, counts_up
from holdfast.worker.executors.kv_cache import TILE_TOKENS, KVSpec
from holdfast.worker.models.gpu_row_rules import RowRule

_MAX_CALL_VALUES: Final = 2**28
"""About how many numbers of keys and values one call may gather: a call costs more than its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCall:
    """One kernel call: tiles of equal shape."""

    num_tiles: int
    num_rows: int
    """Rows of each tile, padding included."""
    num_keys: int
    first_row: int
    """Where its rows begin among those of the step."""
    first_block: int
    """Where its blocks begin among `QueryTiles.block_ids`."""
    num_blocks: int
    """Blocks gathered for each tile."""
    num_skipped: int
    """Keys of the first gathered block that lie before the tile's first key."""
    one_token: bool
    """All rows of a tile belong to the same token, and so share a mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTiles:
    """How the queries of one step are laid out for layers of one kind."""

    calls: tuple[TileCall, ...]
    query_rows: IntArray
    """[rows, num_kv_heads]: which row of the queries, seen as [T * num_heads, key_dim], stands here. Tile by tile."""
    output_rows: IntArray
    """[T * num_heads]: the inverse: where in the outputs, seen as [rows * num_kv_heads, value_dim], each head's is."""
    offsets: IntArray
    """[rows]: the position of the row's query within its tile of 64."""
    block_ids: IntArray
    """The blocks to gather, call by call, tile by tile."""


def cut_into_tiles(
    batch: StepBatch, spec: KVSpec, rule: RowRule, block_size: int, max_call_values: int = _MAX_CALL_VALUES
) -> QueryTiles:
    """The tiles of a step under the position rule. A call gathers about `max_call_values` numbers at most."""
    cut = _cut(batch, spec, rule, block_size)
    cut = cut.ordered(np.argsort(cut.shapes, kind="stable"))
    query_rows, output_rows, offsets = _rows(batch, spec, cut)
    num_blocks = -(-cut.key_ends // block_size) - cut.key_starts // block_size
    return QueryTiles(
        calls=tuple(_calls(cut, num_blocks, spec, block_size, max_call_values)),
        query_rows=query_rows,
        output_rows=output_rows,
        offsets=offsets,
        block_ids=_blocks(batch, cut, num_blocks, block_size),
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """The tiles of a step: of each kind one number for each tile."""

    sequences: IntArray
    first_tokens: IntArray
    """Index of the tile's first token in the step."""
    num_tokens: IntArray
    num_rows: IntArray
    key_starts: IntArray
    key_ends: IntArray
    shapes: IntArray
    """Equal for tiles that may share a call."""

    def ordered(self, order: IntArray) -> "_Cut":
        return _Cut(
            self.sequences[order],
            self.first_tokens[order],
            self.num_tokens[order],
            self.num_rows[order],
            self.key_starts[order],
            self.key_ends[order],
            self.shapes[order],
        )


def _cut(batch: StepBatch, spec: KVSpec, rule: RowRule, block_size: int) -> _Cut:
    """Cuts every sequence's tokens at absolute multiples of the tile."""
    positions = batch.positions
    sequence_of_token = np.repeat(np.arange(len(batch.num_tokens)), batch.num_tokens)
    tile_of_token = positions // TILE_TOKENS
    begins = np.ones(len(positions), dtype=bool)
    begins[1:] = (tile_of_token[1:] != tile_of_token[:-1]) | (sequence_of_token[1:] != sequence_of_token[:-1])
    first_tokens = np.flatnonzero(begins)
    num_tokens = np.append(first_tokens[1:], len(positions)) - first_tokens
    rows = num_tokens * (spec.num_heads // spec.num_kv_heads)
    num_rows = np.maximum(rule.min_rows, -(-rows // rule.multiple_of) * rule.multiple_of)
    tile_starts = positions[first_tokens] // TILE_TOKENS * TILE_TOKENS
    key_starts = np.zeros_like(tile_starts)
    if spec.sliding_window is not None:
        first_keys = np.maximum(tile_starts - spec.sliding_window + 1, 0)
        key_starts = first_keys // TILE_TOKENS * TILE_TOKENS
    key_ends = tile_starts + TILE_TOKENS
    shapes = ((num_rows << 32) + key_ends - key_starts) * block_size + key_starts % block_size
    sequences = sequence_of_token[first_tokens]
    return _Cut(sequences, first_tokens, num_tokens, num_rows, key_starts, key_ends, shapes)


def _rows(batch: StepBatch, spec: KVSpec, cut: _Cut) -> tuple[IntArray, IntArray, IntArray]:
    """`query_rows`, `output_rows` and `offsets`. A padding row repeats the last real row of its tile."""
    group = spec.num_heads // spec.num_kv_heads
    tile_of_row = np.repeat(np.arange(len(cut.num_rows)), cut.num_rows)
    row = counts_up(np.zeros_like(cut.num_rows), cut.num_rows)
    num_real = (cut.num_tokens * group)[tile_of_row]
    real_row = np.minimum(row, num_real - 1)
    token = cut.first_tokens[tile_of_row] + real_row // group
    first_head = token * spec.num_heads + real_row % group
    kv_heads = np.arange(spec.num_kv_heads)
    query_rows = first_head[:, None] + kv_heads * group
    is_real = row < num_real
    output_rows = np.empty(len(batch.token_ids) * spec.num_heads, dtype=np.int64)
    output_rows[query_rows[is_real]] = np.flatnonzero(is_real)[:, None] * spec.num_kv_heads + kv_heads
    return query_rows, output_rows, batch.positions[token] % TILE_TOKENS


def _blocks(batch: StepBatch, cut: _Cut, num_blocks: IntArray, block_size: int) -> IntArray:
    """The blocks that hold each tile's keys. Beyond a sequence's tokens its last block stands in, and is masked."""
    tile_of_block = np.repeat(np.arange(len(num_blocks)), num_blocks)
    sequence = cut.sequences[tile_of_block]
    wanted = counts_up(cut.key_starts // block_size, num_blocks)
    last_blocks = (batch.first_positions + batch.num_tokens - 1) // block_size
    return batch.blocks_of(sequence, np.minimum(wanted, last_blocks[sequence]))


def _calls(cut: _Cut, num_blocks: IntArray, spec: KVSpec, block_size: int, max_call_values: int) -> Iterator[TileCall]:
    """Runs of tiles of equal shape, cut so that no call gathers too much. The tiles are in order of shape."""
    run_starts = [0, *(np.flatnonzero(cut.shapes[1:] != cut.shapes[:-1]) + 1).tolist(), len(cut.shapes)]
    row_ends, block_ends = np.cumsum(cut.num_rows), np.cumsum(num_blocks)
    for run_start, run_end in itertools.pairwise(run_starts):
        num_rows = int(cut.num_rows[run_start])
        blocks_each = int(num_blocks[run_start])
        key_start, key_end = int(cut.key_starts[run_start]), int(cut.key_ends[run_start])
        most = max(1, max_call_values // ((key_end - key_start) * spec.values_per_token))
        for first in range(run_start, run_end, most):
            num_tiles = min(most, run_end - first)
            yield TileCall(
                num_tiles=num_tiles,
                num_rows=num_rows,
                num_keys=key_end - key_start,
                first_row=int(row_ends[first]) - num_rows,
                first_block=int(block_ends[first]) - blocks_each,
                num_blocks=blocks_each,
                num_skipped=key_start % block_size,
                one_token=bool(cut.num_tokens[first : first + num_tiles].max() == 1),
            )
