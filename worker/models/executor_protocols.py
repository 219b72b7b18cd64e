"""Interfaces of executors: methods that all have, and those of executors that overlap steps, run several in one call or
serve adapters.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from holdfast.worker.executors.adapters import AdaptedLinear, Difference, FileContent
from holdfast.worker.executors.cpu.cache import TiledCache
from holdfast.worker.executors.kv_cache import BlockMemory, KVCache
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.step_sampler import HeadOutput, StepSampler


class Executor(Protocol):
    """One rank's share of a model on a device. Used by one thread at a time, but for `layers_done`."""

    @property
    def instruction_class(self) -> str:
        """Device or instruction class, for the log."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of this rank's cache, all layers together."""
        ...

    def make_sampler(self) -> StepSampler:
        """A sampler of this executor's logits."""
        ...

    def layers_done(self) -> int:
        """Layers that have been run since the start, also while a step runs. Safe to call from any thread."""
        ...

    def allocate_cache(self, num_blocks: int, block_size: int) -> TiledCache | KVCache:
        """The cache that steps use from now on. Raises ValueError where the block size does not fit."""
        ...

    def state_bytes(self, num_drafts: int) -> int:
        """Bytes of a sequence's state on this rank, all layers together, if a step has up to this many drafts of it; 0:
        the model keeps none.
        """
        ...

    def allocate_states(self, num_slots: int, num_drafts: int) -> None:
        """The slots that steps use from now on, of a model that keeps states."""
        ...

    def drop_cache(self) -> None: ...

    def run(self, batch: StepBatch, *, with_logits: bool) -> HeadOutput:
        """One step; all ranks of the group run it together. Blocks are copied before. Logits may be the leader's
        alone.
        """
        ...

    def run_layer(self, index: int, x: Tensor, batch: StepBatch) -> Tensor:
        """The residual stream [T, hidden] after one layer, of the step's tokens. Overwrites their slots."""
        ...

    def free_logits(self) -> None:
        """The last step's logits are no longer read."""
        ...

    def warm_up(self, max_rows: int) -> None:
        """Does the one-time work of decode steps of up to `max_rows` sequences in advance. Overwrites the first
        block.
        """
        ...

    @property
    def kv_code(self) -> str:
        """Format that keys and values can be kept in besides the model's dtype, as `cache.kv_cache_dtype` names it."""
        ...

    @property
    def kv_code_numerics(self) -> str:
        """Names that format and its roundings."""
        ...

    def kv_code_difference(self, batch: StepBatch) -> str | None:
        """Difference between this device's keys and values in that format and the right ones, tried on a batch of one
        sequence whose first tokens these are; None: equal in all bits.
        """
        ...

    def keep_kv_in_code(self) -> None:
        """Keeps keys and values in that format from the next cache on."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class OverlappingExecutor(Protocol):
    """An executor of a device that runs by itself."""

    @property
    def overlaps(self) -> bool:
        """Whether a step can be launched before the one before it is collected."""
        ...

    def launch(self, batch: StepBatch, *, with_logits: bool) -> Any:
        """Starts one step, and waits for nothing. Pending tokens are put in on the device."""
        ...

    def collect(self, launched: Any) -> HeadOutput:
        """Output of the oldest step that was launched and not collected."""
        ...

    def logits_to_draw_from(self, launched: Any) -> Tensor | None:
        """The logits of the step launched last, for kernels that are launched before the next one; None where it draws
        by itself.
        """
        ...


@runtime_checkable
class MultiStepExecutor(Protocol):
    """An executor that may run several steps in one call."""

    @property
    def runs_several_steps(self) -> bool:
        """Whether it does now, which is the same on all ranks."""
        ...


@runtime_checkable
class MovableExecutor(Protocol):
    """An executor whose blocks can be copied elsewhere and back."""

    def block_memory(self) -> BlockMemory:
        """The caches that were allocated."""
        ...


class PackedAdapter(Protocol):
    """One rank's share of an adapter, as its executor keeps it."""

    @property
    def differences(self) -> Mapping[str, Sequence[Difference]]:
        """Between what a step adds and the matrices, for each part of each linear."""
        ...


@runtime_checkable
class AdaptingExecutor(Protocol):
    """An executor whose rows may have adapters. Its plans and packed adapters are for it alone."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model, which adapters are rounded to."""
        ...

    def allocate_adapters(self, num_slots: int) -> None:
        """Steps from now on find adapters in slots from 1 to `num_slots`, all of which are empty."""
        ...

    def plan_adapter(self, adapted: Mapping[str, AdaptedLinear]) -> Any:
        """Plan of packing adapters of one form, by the places of their linears. Safe to call from any thread. Raises
        `ConfigurationError` for places whose adapters the executor does not add.
        """
        ...

    def pack_adapter(self, plan: Any, content: FileContent) -> Any:
        """This rank's share of an adapter (a `PackedAdapter`), from the content of its file. Safe to call from any
        thread, at any time.
        """
        ...

    def put_adapter(self, slot: int, adapter: Any) -> None:
        """Steps from now on find it in this slot, from 1 on; None: nothing. Between two steps. Ends what was there."""
        ...
