"""Arrays of one step for the native library, and the memory of its results."""

import ctypes
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.cpu.linear_structures import NativeAdapter
from holdfast.worker.executors.cpu.step_structures import NativeStep
from holdfast.worker.executors.step_batch import StepBatch


class RunningStep:
    """A step's arrays as the library takes them; they live as long as this."""

    def __init__(self, batch: StepBatch, layers_done: int) -> None:
        self.num_drawn = len(batch.logits_rows)
        """Rows that have logits: the first of those wanted."""
        self.pooled: np.ndarray | None = None
        self._wanted = batch.logits_rows
        if batch.pooled_rows.size:
            self._wanted = np.concatenate((batch.logits_rows, batch.pooled_rows))
        self.logits: Tensor | None = None
        self.block_best: Tensor | None = None
        self.block_mass: Tensor | None = None
        self.best = np.empty(self.num_drawn, dtype=np.int32)
        self._batch = batch
        self.native = NativeStep(
            array_address(batch.token_ids),
            array_address(batch.first_positions),
            array_address(batch.num_tokens),
            array_address(batch.num_blocks),
            array_address(batch.block_ids),
            array_address(self._wanted),
            array_address(batch.num_window_blocks) if batch.num_window_blocks.size else None,
            array_address(batch.window_block_ids) if batch.num_window_blocks.size else None,
            array_address(batch.state_slots),
            array_address(batch.num_drafts),
            None,
            None,
            None,
            None,
            None,
            array_address(self.best),
            layers_done,
            None,
            None,
            None,
            array_address(batch.second_starts) if batch.second_starts.size else None,
            len(batch.token_ids),
            len(batch.num_tokens),
            len(self._wanted),
        )

    def add_adapters(self, adapters: Mapping[int, NativeAdapter]) -> None:
        """Gives its rows the adapters of their sequences, by slot."""
        slots = sorted(set(self._batch.adapter_slots.tolist()) - {0})
        numbers = np.full(max(slots, default=0) + 1, -1, dtype=np.int32)
        numbers[slots] = np.arange(len(slots))
        natives = [adapters[slot] for slot in slots]
        self._adapters = (NativeAdapter * len(natives))(*natives)
        self._adapter_of = np.repeat(numbers[self._batch.adapter_slots], self._batch.num_tokens)
        self.native.adapter_of = array_address(self._adapter_of)
        self.native.adapters = ctypes.addressof(self._adapters)
        self.native.num_adapters = len(natives)

    def ask_for_pooled(self, hidden_size: int) -> None:
        """The states of the rows that are pooled, behind the final norm: [rows, hidden], float32."""
        out = np.empty((len(self._batch.pooled_rows), -(-hidden_size // 16) * 16), dtype=np.float32)
        self.pooled = out[:, :hidden_size]
        self.native.pooled, self.native.num_pooled = array_address(out), len(out)

    def ask_for_logits(self, out: Tensor) -> None:
        """This rank's, [rows wanted, vocab rows]."""
        self.logits = out
        self.native.logits = out.data_ptr()

    def ask_for_block_best(self, out: Tensor) -> None:
        """Requests the block maxima of a model on one rank: [rows wanted, groups]."""
        self.block_best = out
        self.native.block_best = out.data_ptr()

    def ask_for_block_mass(self, out: Tensor) -> None:
        """Like `ask_for_block_best`."""
        self.block_mass = out
        self.native.block_mass = out.data_ptr()

    def ask_for_all_logits(self, out: Tensor) -> None:
        """Requests the logits of all ranks: [rows wanted, vocab size]."""
        self.logits = out
        self.native.all_logits = out.data_ptr()

    def ask_for_hidden(self, out: Tensor) -> None:
        """The residual stream behind the last layer, of all rows: [rows, hidden]."""
        self.native.hidden = out.data_ptr()


class RowMemory:
    """Memory of one step's rows, used again by the next: new memory of such a size costs a page fault for each page."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def of(self, num_rows: int, length: int) -> Tensor:
        """[num_rows, length], float32, with whatever is in there."""
        if num_rows * length > len(self._memory):
            self._memory = torch.empty(num_rows * length)
        return self._memory[: num_rows * length].view(num_rows, length)


def array_address(array: np.ndarray) -> int:
    """Address of a contiguous array."""
    assert array.flags.c_contiguous, "the parts of a step lie in one piece"
    address: int = array.__array_interface__["data"][0]
    return address
