"""Decoder of the native library: buffers for steps of up to a number of rows, and the calls that run steps in them."""

import ctypes
from ctypes import byref
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu.exchange import check_step, meet
from holdfast.worker.executors.cpu.packing import PackedModel
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.cpu.running_step import RunningStep
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup

_FEWEST_ROWS: Final = 64


class Decoder:
    """One rank's decoder. Buffers take memory only once they are written to.

    All ranks have run the same steps, so all make theirs in the same step.
    """

    def __init__(self, packed: PackedModel, group: TensorParallelGroup, pool: NativePool, num_rows: int) -> None:
        """Raises `ReplicaError` where there is no memory for steps of `num_rows` tokens, or a rank is lost."""
        model = packed.model
        if num_rows > model.max_rows:
            model.max_rows = max(num_rows, 2 * model.max_rows, _FEWEST_ROWS)
        self._library = pool.library
        self._pool = pool
        self._exchange = meet(group, model, self._library)
        self._handle: int | None = self._library.native_decoder_create(byref(model), packed.dtype, pool.handle)
        if not self._handle:
            self._close_exchange()
            raise ReplicaError(f"out of memory for a step of {num_rows} tokens")
        pool.begin_use()
        self.max_rows: Final = model.max_rows
        self.in_one_call: Final = group.size == 1 or self._exchange is not None
        """Whether the library itself adds what ranks have: then all ranks know the tokens that a step has drawn."""
        self._hidden = model.hidden
        self._stride = self._library.native_decoder_stride(self._handle)
        self._sum_columns = self._hidden if model.sum_parts == 1 else self._stride

    @property
    def shares_memory(self) -> bool:
        """Whether sums over ranks go through memory that they share, within the library."""
        return self._exchange is not None

    def close(self) -> None:
        """Raises `ReplicaError` while a step runs on another thread: its buffers stay as they are."""
        if self._handle and self._library.native_decoder_destroy(self._handle):
            raise ReplicaError("a step runs: its memory cannot be freed")
        if self._handle:
            self._handle = None
            self._pool.end_use()
        self._close_exchange()

    def _close_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def begin(self, step: RunningStep) -> None:
        """The calls that follow run this step. Raises `ReplicaError` where there is no memory for it."""
        if self._library.native_decoder_begin(self._handle, byref(step.native)):
            raise ReplicaError("there is no memory for a step")

    def run_segments(self, first: int, end: int, finished_layer: int = -1) -> None:
        """Runs segments `first` to `end - 1`: the embedding, three of each layer, the head. Raises `ReplicaError` for a
        step that fails.
        """
        outcome = self._library.native_decoder_run(self._handle, first, end, finished_layer)
        if outcome:
            check_step(outcome)

    def launch(self, step: RunningStep) -> None:
        """Starts a whole step, on one rank, after those launched before it. Nothing else is run meanwhile. Raises
        `ReplicaError` where it cannot be run.
        """
        check_step(self._library.native_decoder_launch(self._handle, byref(step.native)))

    def outcome_of_launched(self) -> int:
        """The library's outcome of the oldest step that was launched and not asked for. Waits for it."""
        return int(self._library.native_decoder_await(self._handle))

    def partial(self, num_rows: int) -> Tensor:
        """[num_rows, columns], float32: what this rank adds to a sum over ranks, in the decoder's own memory."""
        return self._view(self._library.native_decoder_partial(self._handle), num_rows, self._sum_columns)

    def residual(self, num_rows: int) -> Tensor:
        """[num_rows, hidden], float32: the residual stream, in the decoder's own memory."""
        return self._view(self._library.native_decoder_residual(self._handle), num_rows, self._hidden)

    def _view(self, address: int, num_rows: int, columns: int) -> Tensor:
        memory = (ctypes.c_float * (num_rows * self._stride)).from_address(address)
        rows: Tensor = torch.frombuffer(memory, dtype=torch.float32).view(num_rows, self._stride)
        return rows[:, :columns]
