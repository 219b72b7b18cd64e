"""Program of a rank: what runs the steps of its share of a model, the decoder program or the Hugging Face skeleton.

What may live here: the choice between the two, and the skeleton as a program. What may not: how a model becomes a
decoder program (`worker/decoder/program.py`), its Hugging Face modules (`model.py`), the cache's size (`loading.py`).
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from holdfast.worker.attention.kv_cache import KVCache
from holdfast.worker.attention.paged import AttentionContext, PagedAttention
from holdfast.worker.config import WorkerConfig
from holdfast.worker.decoder.cpu.library import Unavailable
from holdfast.worker.decoder.cpu.sampler import NativeSampler
from holdfast.worker.decoder.program import build_program
from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.model.checks import OTHER_ENGINE
from holdfast.worker.model.memory import default_block_size, kv_bytes_per_token
from holdfast.worker.model.model import RankModel, build_rank_model
from holdfast.worker.model.parallelize import Target
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.sampling.head_output import HeadOutput
from holdfast.worker.sampling.step_sampler import StepSampler, TorchSampler

logger = logging.getLogger(__name__)


class BlockCache(Protocol):
    """The memory of a program's keys and values, by blocks."""

    num_blocks: int
    block_size: int

    def clear(self, block_ids: Tensor) -> None:
        """Writes zeros over these blocks in all layers."""
        ...


class Program(Protocol):
    """Runs the steps of one rank. All ranks of a group make the same calls."""

    progress: ProgressCounter
    """Moves with every layer of every step."""

    @property
    def sampler(self) -> StepSampler:
        """Reads the leader's logits."""
        ...

    @property
    def numerics(self) -> str:
        """Names the order of its arithmetic: programs of different numerics differ in their bits."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Of this rank's cache, all layers together."""
        ...

    @property
    def row_invariant(self) -> bool:
        """Whether no trial of its kernels found a row that depends on its neighbours."""
        ...

    def allocate_cache(self, num_blocks: int, block_size: int) -> BlockCache:
        """The cache that steps use from now on. Raises ValueError where the block size does not fit."""
        ...

    def drop_cache(self) -> None:
        """Frees the cache; another is allocated before the next step."""
        ...

    def run(self, batch: StepBatch, *, with_logits: bool) -> HeadOutput:
        """One step. The leader's output counts; others may return less."""
        ...

    def close(self) -> None:
        """Frees threads and memory. Nothing is run after it."""
        ...


class SkeletonProgram:
    """Hugging Face's modules with Holdfast's attention and linears."""

    numerics: Final = "skeleton"

    def __init__(self, model: RankModel, target: Target) -> None:
        """`model` is settled."""
        self.model = model
        self._target = target
        self.sampler = choose_sampler(target)
        self.context: AttentionContext | None = None
        self.progress = ProgressCounter()

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.model.specs, self._target.dtype)

    @property
    def row_invariant(self) -> bool:
        return self._target.tiles.report.row_invariant

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        target = self._target
        cache = KVCache.allocate(self.model.specs, num_blocks, block_size, target.dtype, target.device)
        context = self.context = AttentionContext(cache, target.tiles, self.progress)
        self.model.attach(lambda layer: PagedAttention(context, layer))
        return cache

    def drop_cache(self) -> None:
        self.model.detach()
        self.context = None

    def run(self, batch: StepBatch, *, with_logits: bool) -> HeadOutput:
        assert self.context is not None, "a cache is allocated before steps run"
        with torch.inference_mode():
            self.context.begin(batch)
            logits = self.model(batch)
        return HeadOutput(logits.float() if self._target.group.rank == 0 else None, None)

    def close(self) -> None:
        self.sampler.close()


def choose_sampler(target: Target) -> StepSampler:
    """The native sampler where it runs. Only the leader draws, so the others' has no threads."""
    if target.device.type != "cpu":
        return TorchSampler()
    try:
        return NativeSampler.with_threads(torch.get_num_threads() if target.group.rank == 0 else 1)
    except Unavailable as error:
        logger.info("draws run on PyTorch: %s", error)
        return TorchSampler()


def load_program(
    config: WorkerConfig,
    folder: Path,
    hf_config: Any,
    target: Target,
    max_model_len: int,
    progress: Callable[[str, int, int], None],
) -> Program:
    """Loads this rank's share of the model in `folder`. All ranks of the group do so together.

    Raises `UnsupportedModelError` where a gate refuses the model, or where it must run as a decoder program and cannot.
    """
    model = build_rank_model(config.model, folder, hf_config, target, lambda *done: progress("load", *done))
    wanted = config.model.executor
    if wanted != "skeleton":
        block_size = config.cache.block_size or default_block_size(target.device)
        reason = "it has no executor for GPUs yet"
        if target.device.type == "cpu":
            built = build_program(model.module, target.group, max_model_len=max_model_len, block_size=block_size)
            if not isinstance(built, str):
                return built
            reason = built
        if wanted == "decoder":
            raise UnsupportedModelError(hf_config.model_type, f"no decoder program: {reason}", OTHER_ENGINE)
        logger.info("runs on the skeleton: %s", reason)
    model.settle(lambda *done: progress("pack", *done))
    return SkeletonProgram(model, target)
