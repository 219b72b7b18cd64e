"""The HF backend on a GPU: the executor's products, experts, paged attention and draws; decode steps as CUDA graphs."""

import logging
from functools import partial
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.gpu.graphs import (
    Buffers,
    Capture,
    DecodeGraphs,
    StepWait,
    buckets_up_to,
    cuda_capture,
)
from holdfast.worker.executors.gpu.launches import Launch, Launches, triton_launch
from holdfast.worker.executors.gpu.paged_kernels import PagedKernels, unfit
from holdfast.worker.executors.gpu.products import DeviceExperts, DeviceProduct, RowFunctions
from holdfast.worker.executors.gpu.sampler import DeviceSampler
from holdfast.worker.executors.gpu.step_inputs import BegunStep
from holdfast.worker.executors.kv_cache import KVCache, LayerCache
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.models.checks import OTHER_ENGINE, first_line
from holdfast.worker.models.experts import Experts
from holdfast.worker.models.hf_steps import PagedAttention
from holdfast.worker.models.linear import Kernel
from holdfast.worker.models.memory import kv_bytes_per_token
from holdfast.worker.models.model import RankModel
from holdfast.worker.models.parallelize import Target
from holdfast.worker.progress import ProgressCounter

logger = logging.getLogger(__name__)

NUMERICS: Final = "triton-1"
"""The order of all additions and roundings of our kernels. A change of any bit takes the next number."""


class DeviceSteps:
    """Runs the steps of one rank's HF backend over one cache."""

    numerics: Final = NUMERICS

    def __init__(
        self,
        model: RankModel,
        cache: KVCache,
        kernels: PagedKernels,
        functions: RowFunctions,
        progress: ProgressCounter,
        capture: Capture | None,
    ) -> None:
        """`kernels` are what the model's attention modules call over `cache`. Without `capture` all steps are eager."""
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._functions = functions
        self._progress = progress
        self._graphs = DecodeGraphs(capture)
        self._buffers = Buffers(cache.layers[0].keys.device)
        self._vocab_size = 0

    @property
    def num_captured(self) -> int:
        return self._graphs.num_captured

    def run(self, batch: StepBatch) -> Tensor:
        """The logits [rows wanted, vocab] of one step, float32, in a buffer that the next step overwrites."""
        if batch.block_copies.size:
            self._cache.copy(*torch.from_numpy(batch.block_copies).to(self._buffers.device))
        num_wanted = len(batch.logits_rows)
        begun = self._kernels.begin_padded(batch) if self._graphs.are_used and batch.is_decode else None
        if begun is None or begun.key is None:
            return self._run_step(self._kernels.begin(batch))[:num_wanted]
        self._progress.tick()  # a replay runs no layer on the host
        self._graphs.run(begun.key, self._buffers, lambda: self._keep(self._run_step(begun)))
        return self._kept(len(begun.wanted))[:num_wanted]

    def warm_up(self, max_rows: int) -> None:
        """Captures all graphs of decode steps of up to `max_rows` sequences; where one cannot be, as the model's code
        waits for the device or copies from main memory, all steps are eager.

        Without graphs, runs one step of each power of two: kernels are compiled at their first use. Overwrites the
        first block of the cache.
        """
        cache = self._cache
        if self._graphs.are_used:
            try:
                self._capture_all(max_rows)
            except RuntimeError as error:
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
        for num_rows in buckets_up_to(max_rows):
            for batch in self._kernels.inputs.batches_of_graphs(num_rows):
                self.run(batch)

    def _run_step(self, begun: BegunStep) -> Tensor:
        """Token ids, positions and rows are read on the device."""
        step = begun.tensors
        with self._functions:
            return self._model.logits(step.token_ids.long(), step.positions.long(), begun.wanted.long()).float()

    def _keep(self, logits: Tensor) -> None:
        self._vocab_size = logits.shape[1]
        self._kept(len(logits)).copy_(logits)

    def _kept(self, num_rows: int) -> Tensor:
        return self._buffers.take("logits", (num_rows, self._vocab_size))


class HfDeviceBackend:
    """The kernels of one rank's HF backend on a GPU. Rows are independent of each other by construction."""

    def __init__(
        self,
        model: RankModel,
        target: Target,
        *,
        max_positions: int,
        launch: Launch = triton_launch,
        capture: Capture | None = None,
    ) -> None:
        """Takes the experts' weights; `model` is settled before steps are made. `capture` makes a CUDA graph of work,
        and is torch's on a CUDA device; ranks that add over a group run without.

        Raises `UnsupportedModelError` for attention that the kernels do not run.
        """
        if reason := unfit(model.specs):
            raise UnsupportedModelError(model.module.config.model_type, f"its attention {reason}", OTHER_ENGINE)
        self._model = model
        self._target = target
        self._max_positions = max_positions
        self._launch = launch
        self._launches = Launches(launch)
        self._functions = RowFunctions(launch, target.device)
        if capture is None and target.device.type == "cuda":
            # steps follow each other, and leave nothing in the pool that is read later
            capture = partial(cuda_capture, pool=torch.cuda.graph_pool_handle(), warms_up=True)
        self._capture = capture if target.group.size == 1 else None
        for part in model.module.modules():
            if isinstance(part, Experts):
                part.group(partial(DeviceExperts, launch))

    def linear(self, weight: Tensor, bias: Tensor | None, num_slices: int = 1, *, is_part: bool = False) -> Kernel:
        """The executor's product."""
        return DeviceProduct(self._launches, weight, bias, num_slices, is_part=is_part)

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self._model.specs, self._target.dtype)

    def make_sampler(self) -> DeviceSampler:
        """Draws where the logits are. It has the group's limit, since it waits for a step."""
        group = self._target.group
        wait = StepWait(group.data_timeout_s, lambda: "the replica has failed" if group.is_aborted else None)
        self._sampler = DeviceSampler(Buffers(self._target.device), launch=self._launch, wait=wait)
        return self._sampler

    def warm_up_sampler(self, max_rows: int) -> None:
        """Compiles the sampler's kernels for up to `max_rows` rows."""
        vocab_size = self._model.module.config.vocab_size
        self._sampler.warm_up(torch.zeros((max_rows, vocab_size), device=self._target.device))

    def allocate(self, num_blocks: int, block_size: int, progress: ProgressCounter) -> tuple[KVCache, DeviceSteps]:
        specs, target = self._model.specs, self._target
        kernels = PagedKernels(
            specs,
            max_positions=self._max_positions,
            block_size=block_size,
            device=target.device,
            launch=self._launch,
            step_limit_s=target.group.data_timeout_s,
        )
        cache = KVCache.allocate(specs, num_blocks, block_size, target.dtype, target.device)
        self._model.attach(
            lambda layer: PagedAttention(specs[layer], partial(_attend, kernels, cache.layers[layer]), progress)
        )
        return cache, DeviceSteps(self._model, cache, kernels, self._functions, progress, self._capture)


def _attend(
    kernels: PagedKernels,
    layer: LayerCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    kernels.write(layer, key, value)
    return kernels.attend(layer, query.transpose(0, 1), scaling, sinks)
