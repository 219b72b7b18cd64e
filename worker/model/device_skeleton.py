"""The skeleton on a GPU: its draws, and whether attention runs on paged kernels and decode steps as CUDA graphs.

The last two are found out at load, and the log says why where one does not. What may not live here: a step's way
(`device_steps.py`), the proof of the kernels (`attention_proof.py`), the probe of a model's code (`capture_probe.py`).
"""

import logging
from functools import partial

import torch
from torch import Tensor

from holdfast.worker.attention.kv_cache import KVCache, KVSpec
from holdfast.worker.attention.paged import AttentionContext, PagedAttention
from holdfast.worker.attention.trial import rows_agree
from holdfast.worker.decoder.gpu.buffers import Buffers
from holdfast.worker.decoder.gpu.graphs import Capture, cuda_capture
from holdfast.worker.decoder.gpu.launches import Launch, triton_launch
from holdfast.worker.decoder.gpu.paged_kernels import PagedKernels, unfit
from holdfast.worker.decoder.gpu.sampler import DeviceSampler
from holdfast.worker.decoder.gpu.step_wait import StepWait
from holdfast.worker.decoder.program import all_ranks
from holdfast.worker.model.attention_proof import MAX_POSITIONS, RowsAgree, disagreement
from holdfast.worker.model.capture_probe import reason_against_capture
from holdfast.worker.model.checks import first_line
from holdfast.worker.model.device_steps import DeviceSteps
from holdfast.worker.model.model import RankModel
from holdfast.worker.model.parallelize import Target
from holdfast.worker.progress import ProgressCounter

logger = logging.getLogger(__name__)

_PROBED_ROWS = 8


class DeviceSkeleton:
    """Makes the steps of one rank's skeleton on a GPU, and its draws."""

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
        """`model` is settled. `capture` makes a CUDA graph of work, and is torch's on a CUDA device; ranks that add
        over a group run without. `agree` is the trial of the kernels' bits.
        """
        self._model = model
        self._target = target
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
        return DeviceSampler(Buffers(self._target.device), launch=self._launch, wait=wait)

    def make_steps(self, cache: KVCache, progress: ProgressCounter) -> DeviceSteps | None:
        """The model's steps over a cache, with its attention attached; None: the paged kernels may not serve it."""
        if self._against_kernels(cache.block_size) is not None:
            return None
        self._probe()
        kernels = PagedKernels(
            self._model.specs,
            max_positions=self._max_positions,
            block_size=cache.block_size,
            device=self._target.device,
            launch=self._launch,
            step_limit_s=self._target.group.data_timeout_s,
        )
        context = AttentionContext(cache, kernels, progress)
        self._model.attach(lambda layer: PagedAttention(context, layer))
        return DeviceSteps(self._model.logits, context, kernels, self._capture)

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
