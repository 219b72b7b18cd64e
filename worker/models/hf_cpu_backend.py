"""The HF backend on CPUs: the native library's products and attention, over the executor's KV cache."""

from functools import partial
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.cpu.attention import LayerAttention, unfit
from holdfast.worker.executors.cpu.cache import TiledCache, elements_per_token
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.cpu.products import PackedProduct
from holdfast.worker.executors.cpu.sampler import NativeSampler
from holdfast.worker.models.checks import OTHER_ENGINE
from holdfast.worker.models.linear import Kernel
from holdfast.worker.models.model import RankModel
from holdfast.worker.models.paged import PagedAttention
from holdfast.worker.models.parallelize import Target
from holdfast.worker.progress import ProgressCounter


class CpuSteps:
    """Runs the steps of one rank's HF backend over one cache."""

    numerics: Final = ""

    def __init__(self, model: RankModel, cache: TiledCache, attention: LayerAttention) -> None:
        """`attention` is over the cache, and what the model's modules call."""
        self._model = model
        self._cache = cache
        self._attention = attention

    def run(self, batch: StepBatch) -> Tensor:
        """The logits [rows wanted, vocab] of one step, float32."""
        with self._cache.step(batch):
            self._attention.begin(batch)
            return self._model(batch).float()

    def warm_up(self, max_rows: int) -> None:
        """Nothing: no step does what the next need not."""

    def close(self) -> None:
        self._attention.close()
        self._cache.close()


class HfCpuBackend:
    """The kernels of one rank's HF backend on CPUs: one pool of threads for its products and its attention."""

    row_invariant: Final = True  # by construction

    def __init__(self, model: RankModel, target: Target) -> None:
        """Raises `UnsupportedModelError` for attention that the native library does not run."""
        if reason := unfit(model.specs):
            raise UnsupportedModelError(model.module.config.model_type, f"its attention {reason}", OTHER_ENGINE)
        self._model = model
        self._target = target
        self._pool = NativePool(torch.get_num_threads())

    def linear(self, weight: Tensor, bias: Tensor | None) -> Kernel:
        """The native library's product."""
        return PackedProduct(self._pool, weight, bias)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(map(elements_per_token, self._model.specs)) * self._target.dtype.itemsize

    def make_sampler(self) -> NativeSampler:
        """Draws on the same threads."""
        assert self._pool.handle is not None, "the pool is open"
        return NativeSampler(self._pool.library, self._pool.handle)

    def warm_up_sampler(self, max_rows: int) -> None:
        """Nothing is compiled at its first use."""

    def allocate(self, num_blocks: int, block_size: int, progress: ProgressCounter) -> tuple[TiledCache, CpuSteps]:
        specs, dtype = self._model.specs, self._target.dtype
        cache = TiledCache(specs, num_blocks, block_size, dtype, self._pool.library)
        attention = LayerAttention(self._pool, specs, cache, dtype)
        self._model.attach(lambda layer: PagedAttention(specs[layer], partial(attention.attend, layer), progress))
        return cache, CpuSteps(self._model, cache, attention)
