"""The HF backend on a GPU: its draws, and whether attention runs on paged kernels and decode steps as CUDA graphs.

The last two are found out at load, and the log says why where one does not.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.distributed.torch_internals import TorchDispatchMode, tree_leaves
from holdfast.worker.executors.gpu.graphs import (
    BUCKETS,
    Buffers,
    Capture,
    DecodeGraphs,
    StepWait,
    bucket_of,
    cuda_capture,
)
from holdfast.worker.executors.gpu.launches import Launch, triton_launch
from holdfast.worker.executors.gpu.paged_kernels import NUMERICS, PagedKernels, unfit
from holdfast.worker.executors.gpu.sampler import DeviceSampler
from holdfast.worker.executors.kv_cache import KVCache, KVSpec
from holdfast.worker.models.checks import first_line
from holdfast.worker.models.gpu_attention import attach, copy_blocks
from holdfast.worker.models.gpu_attention_proof import MAX_POSITIONS, RowsAgree, disagreement
from holdfast.worker.models.gpu_attention_trial import rows_agree
from holdfast.worker.models.hf_gather_backend import HfGatherBackend
from holdfast.worker.models.hf_steps import HfSteps
from holdfast.worker.models.model import RankModel
from holdfast.worker.models.native_backend import all_ranks
from holdfast.worker.models.parallelize import Target
from holdfast.worker.progress import ProgressCounter

logger = logging.getLogger(__name__)

Logits = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A model: token ids [T], positions [T] and rows wanted [W], int64, to logits [W, vocab]."""


class DeviceSteps:
    """Runs the steps of one rank's HF backend on paged kernels."""

    numerics: Final = NUMERICS

    def __init__(
        self,
        logits: Logits,
        cache: KVCache,
        kernels: PagedKernels,
        progress: ProgressCounter,
        capture: Capture | None,
    ) -> None:
        """`kernels` are what the model's attention modules call over `cache`. Without `capture` all steps are eager."""
        self._logits = logits
        self._cache = cache
        self._kernels = kernels
        self._progress = progress
        self._graphs = DecodeGraphs(capture)
        self._buffers = Buffers(cache.layers[0].keys.device)
        self._vocab_size = 0

    @property
    def num_captured(self) -> int:
        return self._graphs.num_captured

    def run(self, batch: StepBatch) -> Tensor:
        """The logits [rows wanted, vocab] of one step, float32, in a buffer that the next step overwrites."""
        copy_blocks(self._cache, batch)
        num_wanted = len(batch.logits_rows)
        key = self._kernels.begin_padded(batch) if self._graphs.are_used and batch.is_decode else None
        if key is None:
            self._kernels.begin(batch)
            return self._run_step()[:num_wanted]
        self._progress.tick()  # a replay runs no layer on the host
        self._graphs.run(key, self._buffers, lambda: self._keep(self._run_step()))
        return self._kept(key[0])[:num_wanted]

    def warm_up(self, max_rows: int) -> None:
        """Captures all graphs of decode steps of up to `max_rows` sequences; where one cannot be, all steps are eager.

        Without graphs, runs one step of each power of two: kernels are compiled and chosen at their first use.
        Overwrites the first block of the cache.
        """
        cache = self._cache
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
                self.run(StepBatch.decoding(num_rows, context, self._cache.block_size))

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


_INDEXING: Final = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
"""Their sizes depend on values only where they are given a mask."""


class _RefusedError(Exception):
    """An operation that a graph cannot hold."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that a graph cannot hold, before they run."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        inputs = tree_leaves((args, kwargs))
        if torch.Tag.data_dependent_output in func.tags:
            raise _RefusedError(f"a value is read on the host ({func})")
        if torch.Tag.dynamic_output_shape in func.tags and not _is_plain_indexing(func, inputs):
            raise _RefusedError(f"a size depends on values ({func})")
        result = func(*args, **kwargs)
        devices = {leaf.device.type for leaf in (*inputs, *tree_leaves(result)) if _is_array(leaf)}
        if len(devices) > 1:
            raise _RefusedError(f"values go between {' and '.join(sorted(devices))} ({func})")
        return result


def _is_plain_indexing(func: Any, inputs: list[Any]) -> bool:
    is_masked = any(isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in inputs[1:])
    return func.overloadpacket.__name__ in _INDEXING and not is_masked


def _is_array(leaf: object) -> bool:
    """Numbers that kernels are given as arguments are tensors of no dimension in main memory."""
    return isinstance(leaf, Tensor) and (leaf.dim() > 0 or leaf.device.type != "cpu")


def reason_against_capture(
    step: Callable[[Tensor, Tensor, Tensor], object], num_rows: int, device: torch.device
) -> str | None:
    """Why a step of `num_rows` sequences with one token each may not be captured; None: nothing speaks against it.

    `step` is called once with token ids, positions and rows wanted, int64 [num_rows] on `device`.
    """
    token_ids, positions, rows = (torch.zeros(num_rows, dtype=torch.int64, device=device) for _ in range(3))
    try:
        with torch.inference_mode(False), torch.no_grad(), _Watch():  # type: ignore[no-untyped-call]
            step(token_ids, positions, rows)
    except _RefusedError as error:
        return str(error)
    except (RuntimeError, NotImplementedError) as error:
        return f"its code does not run ({first_line(error)})"
    return None


_PROBED_ROWS = 8


class HfDeviceBackend(HfGatherBackend):
    """The kernels of one rank's HF backend on a GPU: paged attention, CUDA graphs and draws where the logits are."""

    def __init__(
        self,
        model: RankModel,
        target: Target,
        *,
        max_positions: int,
        launch: Launch = triton_launch,
        capture: Capture | None = None,
        agree: RowsAgree = rows_agree,
    ) -> None:
        """`model` is settled before steps are made. `capture` makes a CUDA graph of work, and is torch's on a CUDA
        device; ranks that add over a group run without. `agree` is the trial of the kernels' bits.
        """
        super().__init__(model, target)
        self._max_positions = max_positions
        self._launch = launch
        self._agree = agree
        self._outcomes: dict[int, str | None] = {}
        if capture is None and target.device.type == "cuda":
            # steps follow each other, and leave nothing in the pool that is read later
            capture = partial(cuda_capture, pool=torch.cuda.graph_pool_handle(), warms_up=True)
        self._capture = capture if target.group.size == 1 else None
        self._is_probed = False

    def make_sampler(self) -> DeviceSampler:
        """Draws where the logits are. It is what waits for a step, so it has the group's limit."""
        group = self._target.group
        wait = StepWait(group.data_timeout_s, lambda: "the replica has failed" if group.is_aborted else None)
        self._sampler = DeviceSampler(Buffers(self._target.device), launch=self._launch, wait=wait)
        return self._sampler

    def warm_up_sampler(self, max_rows: int) -> None:
        vocab_size = self._model.module.config.vocab_size
        self._sampler.warm_up(torch.zeros((max_rows, vocab_size), device=self._target.device))

    def _make_steps(self, cache: KVCache, progress: ProgressCounter) -> HfSteps:
        if self._against_kernels(cache.block_size) is not None:
            return super()._make_steps(cache, progress)
        self._probe()
        kernels = PagedKernels(
            self._model.specs,
            max_positions=self._max_positions,
            block_size=cache.block_size,
            device=self._target.device,
            launch=self._launch,
            step_limit_s=self._target.group.data_timeout_s,
        )
        attach(self._model, cache, kernels, progress)
        return DeviceSteps(self._model.logits, cache, kernels, progress, self._capture)

    def _against_kernels(self, block_size: int) -> str | None:
        """Why the paged kernels may not serve this model, after a comparison with gather and SDPA; once. All ranks come
        to the same answer.
        """
        if block_size not in self._outcomes:
            reason = self._compare(block_size)
            if not all_ranks(self._target.group, reason is None):
                reason = reason or "another rank's kernels do not serve"
            self._outcomes[block_size] = reason
            if reason is not None:
                logger.warning("attention runs on gather and SDPA in place of paged kernels: %s", reason)
        return self._outcomes[block_size]

    def _compare(self, block_size: int) -> str | None:
        target = self._target
        if reason := unfit(self._model.specs, block_size):
            return reason
        reasons = (
            disagreement(self._small_kernels, spec, block_size, target.dtype, target.device, self._agree)
            for spec in dict.fromkeys(self._model.specs)
        )
        try:
            return next((reason for reason in reasons if reason is not None), None)
        except Exception as error:  # whatever Triton's compiler or a device that is too small for a kernel raises
            return f"they do not run here ({first_line(error)})"

    def _small_kernels(self, spec: KVSpec, block_size: int) -> PagedKernels:
        return PagedKernels(
            [spec],
            max_positions=MAX_POSITIONS,
            block_size=block_size,
            device=self._target.device,
            launch=self._launch,
        )

    def _probe(self) -> None:
        """Gives up capturing where the model's code does not allow it; once."""
        if self._capture is None or self._is_probed:
            return
        self._is_probed = True
        self._model.attach(lambda layer: _attend_alone)
        try:
            reason = reason_against_capture(self._model.logits, _PROBED_ROWS, self._target.device)
        finally:
            self._model.detach()
        if reason is not None:
            self._capture = None
            logger.info("decode steps run without CUDA graphs: %s", reason)


def _attend_alone(query: Tensor, key: Tensor, value: Tensor, **settings: object) -> Tensor:
    """What attention gives where each token sees itself alone: [1, H, T, D] each -> [1, T, H, Dv]."""
    return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2)
