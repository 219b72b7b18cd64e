"""The HF backend on CPUs: the native library's products and attention, over the executor's KV cache."""

from functools import partial
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.cpu.attention import LayerAttention, unfit
from holdfast.worker.executors.cpu.cache import TiledCache, bytes_per_token
from holdfast.worker.executors.cpu.int8_proof import INT8_NUMERICS, int8_difference
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

    def __init__(self, model: RankModel, cache: TiledCache, attention: LayerAttention) -> None:
        """`attention` is over the cache, and what the model's modules call."""
        self.numerics = INT8_NUMERICS if cache.in_int8 else ""
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

    def __init__(self, model: RankModel, target: Target, *, in_int8: bool = False) -> None:
        """`in_int8`: keys and values are kept so. Raises `UnsupportedModelError` for attention that the native library
        does not run, or not as the rule for int8 says.
        """
        if reason := unfit(model.specs):
            raise UnsupportedModelError(model.module.config.model_type, f"its attention {reason}", OTHER_ENGINE)
        self._model = model
        self._target = target
        self._in_int8 = in_int8
        self._pool = NativePool(torch.get_num_threads())
        if in_int8 and (reason := int8_difference(model.specs, target.dtype, self._pool.library)):
            raise UnsupportedModelError(model.module.config.model_type, reason, "Leave --kv-cache-dtype at auto")

    def linear(self, weight: Tensor, bias: Tensor | None) -> Kernel:
        """The native library's product."""
        return PackedProduct(self._pool, weight, bias)

    @property
    def kv_bytes_per_token(self) -> int:
        dtype = self._target.dtype
        return sum(bytes_per_token(spec, dtype, in_int8=self._in_int8) for spec in self._model.specs)

    def make_sampler(self) -> NativeSampler:
        """Draws on the same threads."""
        assert self._pool.handle is not None, "the pool is open"
        return NativeSampler(self._pool.library, self._pool.handle)

    def warm_up_sampler(self, max_rows: int) -> None:
        """Nothing is compiled at its first use."""

    def allocate(self, num_blocks: int, block_size: int, progress: ProgressCounter) -> tuple[TiledCache, CpuSteps]:
        specs, dtype = self._model.specs, self._target.dtype
        cache = TiledCache(specs, num_blocks, block_size, dtype, self._pool.library, in_int8=self._in_int8)
        attention = LayerAttention(self._pool, specs, cache, dtype)
        self._model.attach(lambda layer: PagedAttention(specs[layer], partial(attention.attend, layer), progress))
        return cache, CpuSteps(self._model, cache, attention)
