"""Steps of the skeleton on a GPU with paged kernels: eager, or as CUDA graphs where each sequence has one token.

A graph reads its tokens, positions, slots and block tables from arrays that stay, and leaves its logits in one that
does. What may not live here: kernels (`worker/decoder/gpu/`), whether a model may use them and be captured
(`device_skeleton.py`).
"""

import logging
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.attention.paged import AttentionContext
from holdfast.worker.decoder.gpu.buffers import Buffers
from holdfast.worker.decoder.gpu.graphs import BUCKETS, Capture, DecodeGraphs, bucket_of
from holdfast.worker.decoder.gpu.paged_kernels import NUMERICS, PagedKernels
from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.model.checks import first_line

logger = logging.getLogger(__name__)

Logits = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A model: token ids [T], positions [T] and rows wanted [W], int64, to logits [W, vocab]."""


class DeviceSteps:
    """Runs the steps of one rank's skeleton, whose attention modules are attached to `context`."""

    numerics: Final = NUMERICS

    def __init__(
        self, logits: Logits, context: AttentionContext, kernels: PagedKernels, capture: Capture | None
    ) -> None:
        """`kernels` are the context's backend. Without `capture` all steps are eager."""
        self._logits = logits
        self._context = context
        self._kernels = kernels
        self._graphs = DecodeGraphs(capture)
        self._buffers = Buffers(context.cache.layers[0].keys.device)
        self._vocab_size = 0

    @property
    def num_captured(self) -> int:
        return self._graphs.num_captured

    def run(self, batch: StepBatch) -> Tensor:
        """The logits [rows wanted, vocab] of one step, float32, in a buffer that the next step overwrites."""
        self._context.copy_blocks(batch)
        num_wanted = len(batch.logits_rows)
        key = self._kernels.begin_padded(batch) if self._graphs.are_used and batch.is_decode else None
        if key is None:
            self._kernels.begin(batch)
            return self._run_step()[:num_wanted]
        self._context.progress.tick()  # a replay runs no layer on the host
        self._graphs.run(key, self._buffers, lambda: self._keep(self._run_step()))
        return self._kept(key[0])[:num_wanted]

    def warm_up(self, max_rows: int) -> None:
        """Captures all graphs of decode steps of up to `max_rows` sequences; where one cannot be, all steps are eager.

        Without graphs, runs one step of each power of two: kernels are compiled and chosen at their first use.
        Overwrites the first block of the cache.
        """
        cache = self._context.cache
        if self._graphs.are_used:
            try:
                self._capture_all(max_rows)
            except RuntimeError as error:  # whatever a probe has not seen
                self._graphs = DecodeGraphs(None)
                logger.warning("decode steps run without CUDA graphs: a capture failed (%s)", first_line(error))
        if not self._graphs.are_used:
            for power in reversed(range(max_rows.bit_length())):
                self.run(StepBatch.decoding(1 << power, 1, cache.block_size))
        cache.clear(torch.zeros(1, dtype=torch.int64))

    def close(self) -> None:
        """Drops the graphs, before the cache that they read."""
        self._graphs.clear()

    def _capture_all(self, max_rows: int) -> None:
        last = bucket_of(max_rows) or BUCKETS[-1]
        for num_rows in (bucket for bucket in reversed(BUCKETS) if bucket <= last):
            for context in self._kernels.contexts(num_rows):
                self.run(StepBatch.decoding(num_rows, context, self._context.cache.block_size))

    def _run_step(self) -> Tensor:
        """The step that was begun. Token ids, positions and rows are read on the device."""
        step = self._kernels.step
        logits = self._logits(step.token_ids.long(), step.positions.long(), self._kernels.wanted.long())
        return logits.float()

    def _keep(self, logits: Tensor) -> None:
        self._vocab_size = logits.shape[1]
        self._kept(len(logits)).copy_(logits)

    def _kept(self, num_rows: int) -> Tensor:
        return self._buffers.take("logits", (num_rows, self._vocab_size))
