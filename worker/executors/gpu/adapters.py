"""Adapters of a device's steps: the slots that hold them, and the linears to which their rows add.

The table of slots lies in a fixed place, so a graph stays valid when an adapter is put or replaced. Which linears have
adapters, and how many ranks the largest has, are fixed in a graph: they grow, and then graphs of steps with adapters
are captured anew. Steps without adapters launch nothing of this.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.adapters import EMBEDDING, AdaptedLinear, FileContent
from holdfast.worker.executors.gpu.adapter_launches import (
    RANKS,
    WORDS,
    AdapterLaunches,
    adapter_sites,
    adapter_tiles,
)
from holdfast.worker.executors.gpu.adapter_packing import DeviceAdapter, DevicePlan
from holdfast.worker.executors.gpu.graphs import Buffers, Staging, StepWait
from holdfast.worker.executors.gpu.launches import AdaptedRows, Launch, StepTensors
from holdfast.worker.executors.gpu.linear_tiles import LinearTile
from holdfast.worker.executors.gpu.mixtures import RowGroups, most_tiles
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.layout_arithmetic import next_power
from holdfast.worker.executors.step_batch import StepBatch

_ROWS_OF_A_TILE: Final = 32
"""Rows of each adapter from which on tiles are wide."""


@dataclass(slots=True)
class _Used:
    """A linear that has had adapters."""

    stride: int
    """No adapter has had more ranks: a power of two."""
    part_of: Tensor
    """[outputs], int32: the number of an output's module."""


class DeviceAdapters:
    """One rank's adapters. All ranks make the same calls."""

    def __init__(self, layout: DecoderLayout, launch: Launch, on_growth: Callable[[], None]) -> None:
        """`on_growth` is called between steps, before one that would launch more."""
        self._layout = layout
        self._device = layout.embedding.device
        self._like = torch.zeros(1, dtype=layout.dtype, device=self._device)
        self._launches = AdapterLaunches(launch)
        self._on_growth = on_growth
        self._sites = adapter_sites(layout)
        self._table = torch.zeros((0, len(self._sites), WORDS), dtype=torch.int64, device=self._device)
        self._resident: dict[int, DeviceAdapter] = {}
        self._used: dict[str, _Used] = {}
        self._staging: Staging | None = None
        self._on_device = self._table
        self.buffers = Buffers(self._device)

    def allocate(self, num_slots: int, max_rows: int, wait: StepWait) -> None:
        """The slots, from 0 on, that steps of up to `max_rows` tokens use from now on."""
        self._table = self._table.new_zeros((num_slots, *self._table.shape[1:]))
        self._resident.clear()
        self._on_growth()
        self.fit(max_rows, wait)
        self._warm_up()

    def fit(self, max_rows: int, wait: StepWait) -> None:
        """Makes the arrays of steps of this many tokens, if there are slots and those that there are are smaller."""
        if len(self._table) and 2 * max_rows > len(self._on_device):
            self._staging = Staging(2 * max_rows, self._device, wait)
            self._on_device = torch.zeros(2 * max_rows, dtype=torch.int32, device=self._device)
            most = max(site.most_inner for place, site in self._sites.items() if place != EMBEDDING)  # it is looked up
            self.buffers.take("inner", (max_rows * most,))
            self._on_growth()

    def _warm_up(self) -> None:
        """Compiles what an adapter's proof does not."""
        slots = torch.full((1,), -1, dtype=torch.int32, device=self._device)
        for is_narrow in (True, False):
            adapted = AdaptedRows(slots, slots, is_narrow)
            self._launches.group(slots, len(self._table), self._groups("rows", slots, adapted))
        site, inner = self._sites[EMBEDDING], self.buffers.take("inner", (1, 1, RANKS))
        self._launches.look_up(site, slots, slots, self._like, self._table, 0, self._layout.embedding_scale, inner)

    def plan(self, adapted: Mapping[str, AdaptedLinear]) -> DevicePlan:
        """Plan of packing adapters of one form. Raises `ConfigurationError` for a linear that takes none here."""
        return DevicePlan(self._sites, adapted)

    def pack(self, plan: DevicePlan, content: FileContent) -> DeviceAdapter:
        """Copies an adapter to the device and compares it. Raises `ConfigurationError` where there is no memory."""
        with self._entered():
            try:
                return DeviceAdapter(plan, content, self._like, self._launches)
            except torch.OutOfMemoryError as error:
                raise ConfigurationError(
                    f"an adapter of {plan.num_numbers * self._like.element_size()} bytes finds no room on the device; "
                    "set cache.gpu_memory_utilization lower, or model.max_loras"
                ) from error

    def put(self, slot: int, adapter: DeviceAdapter | None) -> None:
        """Steps that are launched from now on find it in this slot; None: nothing."""
        self._resident.pop(slot, None)  # what runs reads it before its memory is used again, in the stream's order
        records = np.zeros(self._table.shape[1:], dtype=np.int64) if adapter is None else adapter.records
        self._table[slot].copy_(torch.from_numpy(records))
        if adapter is None:
            return
        self._resident[slot] = adapter
        for place in adapter.places:
            stride = max(RANKS, next_power(place.num_ranks))
            used = self._used.get(place.name)
            if used is None:
                part_of = torch.from_numpy(place.added.part_of).to(self._device, torch.int32)
                self._used[place.name] = _Used(stride, part_of)
                self._on_growth()
            elif stride > used.stride:
                used.stride = stride
                self._on_growth()

    def _entered(self) -> AbstractContextManager[object]:
        """The current device is a thread's own, and adapters are packed on threads of theirs."""
        has_number = self._device.type == "cuda" and self._device.index is not None
        return torch.cuda.device(self._device) if has_number else nullcontext()

    def begin(self, batch: StepBatch, num_rows: int, num_wanted: int, *, in_graph: bool) -> AdaptedRows | None:
        """Sends the slots of a step's rows, padded to these numbers; None: no row has an adapter."""
        if not batch.adapter_slots.any():
            return None
        slots, max_rows = batch.adapter_slots - 1, len(self._on_device) // 2
        used = set(slots.tolist()) - {-1}
        assert self._staging is not None, "slots are allocated before they are used"
        assert used <= self._resident.keys(), "a step's adapters are in their slots"
        of_rows = np.repeat(slots, batch.num_tokens)
        flat = self._staging.free().numpy()
        flat[:num_rows] = flat[max_rows : max_rows + num_wanted] = -1
        flat[: len(of_rows)] = of_rows
        flat[max_rows : max_rows + len(batch.logits_rows)] = of_rows[batch.logits_rows]
        self._staging.copy(self._on_device[: max_rows + num_wanted])
        return AdaptedRows(
            slots=self._on_device[:num_rows],
            wanted=self._on_device[max_rows : max_rows + num_wanted],
            is_narrow=in_graph or len(of_rows) <= _ROWS_OF_A_TILE * len(used),
        )

    def group(self, step: StepTensors) -> None:
        """Puts the step's rows into tiles. To be run before anything is added."""
        adapted = step.adapted
        if adapted is None:
            return
        self._launches.group(adapted.slots, len(self._table), self._groups("rows", adapted.slots, adapted))
        if "head" in self._used and len(adapted.wanted):
            self._launches.group(adapted.wanted, len(self._table), self._groups("wanted", adapted.wanted, adapted))

    def adds_to(self, place: str, step: StepTensors) -> bool:
        """Whether rows of a step may add to a linear."""
        return step.adapted is not None and place in self._used

    def add(self, place: str, x: Tensor, step: StepTensors, out: Tensor, *, wanted: bool = False) -> None:
        """Adds to out [slices, T, out] of a linear of x [T, in], float32. `wanted`: the rows are the wanted ones."""
        used, adapted = self._used.get(place), step.adapted
        if used is None or adapted is None:
            return
        site = self._sites[place]
        groups = self._groups(*(("wanted", adapted.wanted) if wanted else ("rows", adapted.slots)), adapted)
        inner = self.buffers.take("inner", (site.num_slices * site.num_pieces, len(x), used.stride))
        self._launches.shrink(site, x, self._table, groups, inner)
        self._launches.expand(site, inner, self._like, self._table, used.part_of, groups, out)

    def add_to_embedding(self, step: StepTensors, first_id: int, residual: Tensor) -> None:
        """Adds to residual [T, hidden]: this rank's share of the vocabulary begins with `first_id`."""
        used, adapted = self._used.get(EMBEDDING), step.adapted
        if used is None or adapted is None:
            return
        site, groups = self._sites[EMBEDDING], self._groups("rows", adapted.slots, adapted)
        inner = self.buffers.take("inner", (1, step.num_rows, used.stride))
        ids, scale = step.token_ids, self._layout.embedding_scale
        self._launches.look_up(site, ids, adapted.slots, self._like, self._table, first_id, scale, inner)
        self._launches.expand(site, inner, self._like, self._table, used.part_of, groups, residual[None])

    def _groups(self, name: str, slots: Tensor, adapted: AdaptedRows) -> RowGroups:
        """Room for any choice of slots: the same memory for the same name and number of rows."""
        narrow, wide = adapter_tiles(self._layout.dtype)
        tile: LinearTile = narrow if adapted.is_narrow else wide
        num_tiles = most_tiles(len(slots), len(self._table), tile.tokens)
        experts = self.buffers.take(f"slots of tiles of {name}", (num_tiles,), torch.int32)
        return RowGroups(tile, experts, self.buffers.take(f"tiles of {name}", (num_tiles, tile.tokens), torch.int32))
