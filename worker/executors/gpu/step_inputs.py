"""Inputs of a device's steps: the arrays that kernels read, of a step as it is or padded to the rows of its graph."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.worker.executors.gpu.graphs import BUCKETS, StepWait, bucket_of
from holdfast.worker.executors.gpu.launches import SPLIT_KEYS, StepTensors, rounded_splits
from holdfast.worker.executors.gpu.step_arrays import QueryTiles, StepArrays
from holdfast.worker.executors.layout import Attention
from holdfast.worker.executors.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class HeadShapes:
    """Shapes of heads that the inputs of a step depend on, of all attention layers of a rank."""

    query_group: int
    """Query heads of a KV head, in the layer that has the most."""
    fewest_kv_heads: int
    head_dim: int
    """Dimensions of the widest head."""

    @classmethod
    def of(cls, attentions: Sequence[Attention]) -> "HeadShapes":
        return cls(
            query_group=max(one.num_heads // one.num_kv_heads for one in attentions),
            fewest_kv_heads=min(one.num_kv_heads for one in attentions),
            head_dim=max(one.head_dim for one in attentions),
        )


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step whose inputs are on their way to the device."""

    tensors: StepTensors
    wanted: Tensor
    """[rows wanted], int32: the rows whose logits are wanted; padding says row 0."""
    key: tuple[int, int] | None
    """Key of its graph: its rows, and the splits of keys that it launches. None: it has no graph."""


class StepInputs:
    """Inputs of one step at a time. Those of steps with graphs have memory of their own, which never moves."""

    def __init__(
        self,
        shapes: HeadShapes,
        *,
        max_rows: int,
        max_positions: int,
        block_size: int,
        device: torch.device,
        wait: StepWait,
    ) -> None:
        """Steps of more than `max_rows` tokens make new arrays, where they have no graph."""
        self._shapes = shapes
        self._max_positions = max_positions
        self._block_size = block_size
        self._device = device
        self._wait = wait
        self._arrays = self._make_arrays(max_rows)
        self._padded = self._make_arrays(BUCKETS[-1])

    @property
    def max_rows(self) -> int:
        """No step has had more rows, padded or not."""
        return max(self._arrays.max_rows, self._padded.max_rows)

    def begin(self, batch: StepBatch, fewest_wanted: int = 0) -> BegunStep:
        """Sends a step as it is; at least so many rows are wanted of it."""
        count, num_wanted = len(batch.token_ids), len(batch.logits_rows)
        if max(count, num_wanted) > self._arrays.max_rows:
            self._arrays = self._make_arrays(max(count, num_wanted))
        arrays = self._arrays
        tiles = arrays.tiles_of(batch)
        arrays.fill(batch, count, tiles, self._block_size)
        splits = (tiles.narrow_splits, tiles.wide_splits)
        tensors = arrays.tensors(count, len(tiles.narrow), len(tiles.wide), splits)
        return BegunStep(tensors, arrays.wanted[: max(fewest_wanted, num_wanted)], None)

    def begin_padded(self, batch: StepBatch) -> BegunStep | None:
        """Sends a step in which each sequence has one token, padded to the rows of a graph; None: it has too many for
        any.
        """
        bucket, arrays = bucket_of(len(batch.token_ids)), self._padded
        if bucket is None:
            return None
        tiles: QueryTiles = arrays.tiles_of(batch)
        splits = self._splits_of_graph(bucket, tiles.narrow_splits)
        arrays.fill(batch, bucket, tiles, self._block_size)
        return BegunStep(arrays.tensors(bucket, bucket, 0, (splits, 0)), arrays.wanted[:bucket], (bucket, splits))

    def batches_of_graphs(self, num_rows: int) -> Iterator[StepBatch]:
        """Batches of one token for each of `num_rows` sequences, one for each graph of this many rows, those of the
        longest contexts first.
        """
        most = -(-self._max_positions // SPLIT_KEYS)
        counts = {self._splits_of_graph(num_rows, 1 << power): 1 << power for power in range(most.bit_length() + 1)}
        for num_splits in sorted(counts.values(), reverse=True):
            context = min(self._max_positions, num_splits * SPLIT_KEYS)
            yield StepBatch.decoding(num_rows, context, self._block_size)

    def _splits_of_graph(self, num_rows: int, num_splits: int) -> int:
        return rounded_splits(num_rows, self._shapes.fewest_kv_heads, num_splits, self._max_positions)

    def _make_arrays(self, max_rows: int) -> StepArrays:
        max_blocks = -(-self._max_positions // self._block_size)
        shapes = self._shapes
        return StepArrays(max_rows, max_blocks, shapes.query_group, shapes.head_dim, self._device, self._wait)
