"""HF backend: runs the steps of Hugging Face's modules with Holdfast's attention and linears."""

import logging
from typing import TYPE_CHECKING, Final

import torch

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.executors.cpu.sampler import NativeSampler
from holdfast.worker.executors.kv_cache import KVCache
from holdfast.worker.executors.step_sampler import HeadOutput, StepSampler
from holdfast.worker.models.memory import kv_bytes_per_token
from holdfast.worker.models.model import RankModel
from holdfast.worker.models.paged import AttentionContext, PagedAttention
from holdfast.worker.models.parallelize import Target
from holdfast.worker.models.sdpa import SdpaBackend
from holdfast.worker.progress import ProgressCounter

if TYPE_CHECKING:  # they load Triton
    from holdfast.worker.models.hf_device_backend import DeviceSteps, HfDeviceBackend

logger = logging.getLogger(__name__)

_NAME: Final = "hf-2"


class HfBackend:
    """Hugging Face's modules with Holdfast's attention and linears."""

    overlapping: Final = None

    def __init__(
        self, model: RankModel, target: Target, *, max_positions: int, device: "HfDeviceBackend | None" = None
    ) -> None:
        """`model` is settled. No sequence is longer than `max_positions`. `device` makes its steps on a GPU."""
        self.model = model
        self._target = target
        self.context: AttentionContext | None = None
        """Where attention gathers and calls SDPA."""
        self.progress = ProgressCounter()
        if device is None and target.device.type == "cuda":
            device = _make_device(model, target, max_positions)
        self._device = device
        self._device_sampler = device.make_sampler() if device is not None else None
        self.sampler: StepSampler = self._device_sampler or _native_sampler(target)
        self._steps: DeviceSteps | None = None

    @property
    def numerics(self) -> str:
        """Attention adds in another order where it runs on paged kernels."""
        return _NAME if self._steps is None else f"{_NAME}-{self._steps.numerics}"

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.model.specs, self._target.dtype)

    @property
    def runs_several_steps(self) -> bool:
        return False

    @property
    def row_invariant(self) -> bool:
        return self._target.tiles.report.row_invariant

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        target = self._target
        cache = KVCache.allocate(self.model.specs, num_blocks, block_size, target.dtype, target.device)
        with torch.inference_mode():
            self._steps = self._device.make_steps(cache, self.progress) if self._device is not None else None
        if self._steps is None:
            context = self.context = AttentionContext(cache, SdpaBackend(cache, target.tiles), self.progress)
            self.model.attach(lambda layer: PagedAttention(context, layer))
        return cache

    def drop_cache(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        self.model.detach()
        self.context = None

    def warm_up(self, max_rows: int) -> None:
        """On a GPU, captures the graphs of decode steps, or runs one step of each power of two: libraries load and
        choose kernels at their first use. Compiles the kernels that draw.
        """
        if self._steps is not None:
            with torch.inference_mode():
                self._steps.warm_up(max_rows)
        elif self._target.device.type == "cuda":
            assert self.context is not None, "a cache is allocated before steps run"
            cache = self.context.cache
            for power in reversed(range(max_rows.bit_length())):
                self.run(StepBatch.decoding(1 << power, 1, cache.block_size), with_logits=True)
            cache.clear(torch.zeros(1, dtype=torch.int64))
        if self._device_sampler is not None and self._target.group.rank == 0:
            vocab_size = self.model.module.config.vocab_size
            self._device_sampler.warm_up(torch.zeros((max_rows, vocab_size), device=self._target.device))

    def run(self, batch: StepBatch, *, with_logits: bool) -> HeadOutput:
        with torch.inference_mode():
            if self._steps is not None:
                logits = self._steps.run(batch)
            else:
                assert self.context is not None, "a cache is allocated before steps run"
                self.context.begin(batch)
                logits = self.model(batch).float()
        return HeadOutput(logits if self._target.group.rank == 0 else None, None)

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()  # graphs go before the group of ranks, or its teardown waits for them
        self.sampler.close()


def _make_device(model: RankModel, target: Target, max_positions: int) -> "HfDeviceBackend | None":
    """None where Triton is not installed: then the CPU draws."""
    try:
        from holdfast.worker.models.hf_device_backend import HfDeviceBackend
    except ImportError as error:
        logger.warning("attention runs on gather and SDPA in place of paged kernels: %s", error)
        return None
    return HfDeviceBackend(model, target, max_positions=max_positions)


def _native_sampler(target: Target) -> NativeSampler:
    """Only the leader draws, so the others' has no threads of use."""
    return NativeSampler.with_threads(torch.get_num_threads() if target.group.rank == 0 else 1)
