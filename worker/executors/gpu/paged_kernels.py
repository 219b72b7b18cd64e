"""Attention of models without a native backend on a GPU: the executor's paged kernels, as layers of a cache call them.

Keys and values are read where they lie. All memory that a step uses is made before the first one and never moves, so a
CUDA graph may hold a step.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.executors.gpu.graphs import StepWait
from holdfast.worker.executors.gpu.kernels.heads import write_pages
from holdfast.worker.executors.gpu.launches import (
    MAX_OUTSIDE_SPLITS,
    SPLIT_KEYS,
    Launch,
    Launches,
    SplitSpace,
    StepTensors,
    triton_launch,
)
from holdfast.worker.executors.gpu.step_arrays import tile_columns
from holdfast.worker.executors.gpu.step_inputs import BegunStep, HeadShapes, StepInputs
from holdfast.worker.executors.kv_cache import KVSpec, LayerCache
from holdfast.worker.executors.layout import Attention
from holdfast.worker.executors.layout_arithmetic import next_power
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.model_info import TILE_TOKENS

MAX_HEAD_DIM: Final = 256  # dimensions
MAX_GROUP: Final = 64
"""Query heads of one KV head."""

_NOTHING: Final = Linear(weights=())


def unfit(specs: Sequence[KVSpec]) -> str | None:
    """Part of a model's attention layers that these kernels do not run; None: they run all."""
    widest = max(max(spec.key_dim, spec.value_dim) for spec in specs)
    if widest > MAX_HEAD_DIM:
        return f"has heads of {widest} dimensions; the maximum on a GPU is {MAX_HEAD_DIM}"
    largest = max(spec.num_heads // spec.num_kv_heads for spec in specs)
    if largest > MAX_GROUP:
        return f"shares a KV head among {largest} query heads; the maximum on a GPU is {MAX_GROUP}"
    return None


class PagedKernels:
    """The attention kernels of one rank, for layers that are not `unfit`. A query's bits depend only on its sequence
    and position.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        *,
        max_positions: int,
        block_size: int,
        device: torch.device,
        max_rows: int = 2048,
        launch: Launch = triton_launch,
        step_limit_s: float = 60.0,
    ) -> None:
        """Steps of more than `max_rows` tokens make new arrays; decode steps have separate arrays. A step
        that the device has not taken within `step_limit_s` fails the next one: `ReplicaError`. Raises ValueError for
        a block size that neither divides a tile of keys nor is a multiple of it.
        """
        if TILE_TOKENS % block_size and block_size % TILE_TOKENS:
            raise ValueError(f"blocks of {block_size} tokens neither divide {TILE_TOKENS} nor are a multiple of it")
        self._launch = launch
        self._launches = Launches(launch)
        shapes = HeadShapes(
            query_group=max(spec.num_heads // spec.num_kv_heads for spec in specs),
            fewest_kv_heads=min(spec.num_kv_heads for spec in specs),
            head_dim=max(max(spec.key_dim, spec.value_dim) for spec in specs),
        )
        self.inputs = StepInputs(
            shapes,
            max_rows=max_rows,
            max_positions=max_positions,
            block_size=block_size,
            device=device,
            wait=StepWait(step_limit_s),
        )
        self._space = _split_space(shapes, max_positions, device)
        self._step: StepTensors

    def begin(self, batch: StepBatch) -> BegunStep:
        """The layers that follow run on this step, as it is. At least one row is wanted: layers need one."""
        begun = self.inputs.begin(batch, fewest_wanted=1)
        self._step = begun.tensors
        return begun

    def begin_padded(self, batch: StepBatch) -> BegunStep | None:
        """Likewise, padded to the rows of a graph; None: it has too many rows for any, and nothing has begun."""
        begun = self.inputs.begin_padded(batch)
        if begun is not None:
            self._step = begun.tensors
        return begun

    def write(self, layer: LayerCache, key: Tensor, value: Tensor) -> None:
        """key [num_kv_heads, T, key_dim] and value [num_kv_heads, T, value_dim] go to the step's slots."""
        spec = layer.spec
        key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
        arguments = {
            "key": key,
            "value": value,
            "keys": layer.keys,
            "values": layer.values,
            "slots": self._step.slots,
            "key_head_stride": key.stride(0),
            "key_row_stride": key.stride(1),
            "value_head_stride": value.stride(0),
            "value_row_stride": value.stride(1),
            "KV_HEADS": spec.num_kv_heads,
            "KEY_DIM": spec.key_dim,
            "KEY_DIMS": next_power(spec.key_dim),
            "VALUE_DIM": spec.value_dim,
            "VALUE_DIMS": next_power(spec.value_dim),
        }
        self._launch(write_pages, (self._step.num_rows, spec.num_kv_heads), arguments, num_warps=1, num_stages=1)

    def attend(self, layer: LayerCache, query: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        """query [T, num_heads, key_dim], sinks [num_heads] -> [T, num_heads, value_dim]. The keys are written.

        Rows of padding come out with whatever their memory held.
        """
        spec, num_rows = layer.spec, len(query)
        attention = Attention(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.key_dim,
            qkv=_NOTHING,
            rotary=None,
            scaling=scaling,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
            sinks=None if sinks is None else sinks.float(),
            output=_NOTHING,
        )
        rows = query.reshape(num_rows, -1).contiguous()  # they may be a part of a wider projection
        out = query.new_empty(num_rows, spec.num_heads, spec.value_dim)
        self._launches.attend(attention, rows, layer, self._step, self._space, out)
        return out


def _split_space(shapes: HeadShapes, max_positions: int, device: torch.device) -> SplitSpace:
    """Memory for the sums of splits; empty if no context has two splits."""
    _, widest = tile_columns(shapes.query_group, shapes.head_dim)
    columns = MAX_OUTSIDE_SPLITS * widest if max_positions > SPLIT_KEYS else 1
    sizes = (columns * max(16, next_power(shapes.head_dim)), columns, columns)
    return SplitSpace(*(torch.empty(size, dtype=torch.float32, device=device) for size in sizes))
