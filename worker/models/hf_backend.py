"""HF backend: runs the steps of Hugging Face's modules with Holdfast's attention and linears; and its device on CPUs,
the native library's products and attention over the executor's KV cache.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.config import KVCacheDtype
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.executors.cpu.cache import TiledCache, bytes_per_token
from holdfast.worker.executors.cpu.int8_proof import INT8_NUMERICS, int8_difference
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.cpu.products import LayerAttention, PackedProduct, unfit
from holdfast.worker.executors.cpu.sampler import NativeSampler
from holdfast.worker.executors.kv_cache import KVCache
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.model_info import Window
from holdfast.worker.models.checks import OTHER_ENGINE
from holdfast.worker.models.damaged_weights import made_by_all
from holdfast.worker.models.hf_steps import HfDevice, HfSteps, PagedAttention
from holdfast.worker.models.linear import Kernel
from holdfast.worker.models.model import RankModel
from holdfast.worker.models.parallelize import Target
from holdfast.worker.progress import ProgressCounter


class CpuSteps:
    """Runs the steps of one rank's HF backend over one cache."""

    def __init__(self, model: RankModel, cache: TiledCache, attention: LayerAttention) -> None:
        """`attention` runs over the cache, and is called by the model's modules."""
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
        """Does nothing: no step does what the next need not."""

    def close(self) -> None:
        self._attention.close()
        self._cache.close()


class HfCpuBackend:
    """The kernels of one rank's HF backend on CPUs: one pool of threads for its products and its attention."""

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

    def linear(self, weight: Tensor, bias: Tensor | None, num_slices: int = 1, *, is_part: bool = False) -> Kernel:
        """The native library's product."""
        return PackedProduct(self._pool, weight, bias, num_slices, is_part=is_part)

    @property
    def kv_bytes_per_token(self) -> int:
        dtype = self._target.dtype
        return sum(bytes_per_token(spec, dtype, in_int8=self._in_int8) for spec in self._model.specs)

    def make_sampler(self) -> NativeSampler:
        """Draws on the same threads."""
        assert self._pool.handle is not None, "the pool is open"
        return NativeSampler(self._pool.library, self._pool.handle)

    def warm_up_sampler(self, max_rows: int) -> None:
        """Does nothing: nothing is compiled at its first use."""

    def allocate(self, num_blocks: int, block_size: int, progress: ProgressCounter) -> tuple[TiledCache, CpuSteps]:
        specs, dtype = self._model.specs, self._target.dtype
        cache = TiledCache(specs, num_blocks, block_size, dtype, self._pool.library, in_int8=self._in_int8)
        attention = LayerAttention(self._pool, specs, cache, dtype)
        self._model.attach(lambda layer: PagedAttention(specs[layer], partial(attention.attend, layer), progress))
        return cache, CpuSteps(self._model, cache, attention)


_NAME: Final = "hf-4"


class HfBackend:
    """Hugging Face's modules with Holdfast's attention and linears."""

    overlapping: Final = None

    def __init__(self, model: RankModel, target: Target, device: HfDevice) -> None:
        """`model` is settled with the device's linears."""
        self.model = model
        self.progress = ProgressCounter()
        self._target = target
        self._device = device
        self.sampler = device.make_sampler()
        self._steps: HfSteps | None = None

    @classmethod
    def settled(
        cls,
        model: RankModel,
        target: Target,
        *,
        max_positions: int,
        kv_cache_dtype: KVCacheDtype = "auto",
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> "HfBackend":
        """Packs the linears of a model that is not settled, for the target's device. No sequence is longer than
        `max_positions`. Keys and values in int8 are for CPUs alone. `progress` gets linears done and in all.

        Raises `UnsupportedModelError` for attention that the device has no kernel for, `ConfigurationError` where
        Triton is missing on a GPU, and `NotFiniteError` where a rank finds a weight with a NaN or an infinity.
        """
        device: HfDevice
        if target.device.type == "cpu":
            device = HfCpuBackend(model, target, in_int8=kv_cache_dtype == "int8")
        else:
            device = _gpu_backend(model, target, max_positions)
        made_by_all(lambda: model.settle(device.linear, progress), target.group, lambda _: None)
        return cls(model, target, device)

    @property
    def numerics(self) -> str:
        """Attention adds in another order on another kind of kernel."""
        parts = (_NAME, self._steps.numerics if self._steps is not None else "")
        return "-".join(part for part in parts if part)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._device.kv_bytes_per_token

    @property
    def multi_step(self) -> None:
        """Each batch is one step."""
        return

    def block_sizes(self, block_size: int, max_model_len: int) -> tuple[int, Window | None]:
        """All layers keep as much."""
        return block_size, None

    def block_bytes(self, block_size: int, window: Window | None) -> int:
        """Bytes of a block on this rank."""
        return self.kv_bytes_per_token * block_size

    def allocate_cache(self, num_blocks: int, block_size: int, window: Window | None = None) -> TiledCache | KVCache:
        assert window is None, "all layers keep as much"
        cache, self._steps = self._device.allocate(num_blocks, block_size, self.progress)
        return cache

    def state_bytes(self, num_drafts: int) -> int:
        """0: a model whose modules keep a state is refused by the dry run."""
        return 0

    def allocate_states(self, num_slots: int, num_drafts: int) -> None:
        """Does nothing: there are no states."""

    def drop_cache(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        self.model.detach()

    def warm_up(self, max_rows: int) -> None:
        """On a GPU, captures the graphs of decode steps, or runs one step of each power of two, and compiles the
        kernels that draw.
        """
        assert self._steps is not None, "a cache is allocated before steps run"
        with torch.inference_mode():
            self._steps.warm_up(max_rows)
        if self._target.group.rank == 0:
            self._device.warm_up_sampler(max_rows)

    def run(self, batch: StepBatch, *, with_logits: bool) -> HeadOutput:
        assert self._steps is not None, "a cache is allocated before steps run"
        with torch.inference_mode():
            logits = self._steps.run(batch)
        return HeadOutput(logits if self._target.group.rank == 0 else None, None)

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()  # graphs go before the group of ranks, or its teardown waits for them
        self.sampler.close()


def _gpu_backend(model: RankModel, target: Target, max_positions: int) -> HfDevice:
    try:
        from holdfast.worker.models.hf_device_backend import HfDeviceBackend  # loads Triton
    except ImportError as error:
        raise ConfigurationError(
            f"model.device = 'cuda': a GPU's kernels need Triton ({error}); install it, or set --device to cpu"
        ) from error
    return HfDeviceBackend(model, target, max_positions=max_positions)
