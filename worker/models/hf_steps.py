"""What the HF backend asks of a kind of device: kernels for linears, a cache, and steps over it."""

from typing import Protocol

from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.executors.cpu.cache import TiledCache
from holdfast.worker.executors.kv_cache import KVCache
from holdfast.worker.executors.step_sampler import StepSampler
from holdfast.worker.models.linear import Kernel
from holdfast.worker.progress import ProgressCounter


class HfSteps(Protocol):
    """Runs steps over one cache, which the model's attention is attached to."""

    @property
    def numerics(self) -> str:
        """Names attention's order of adding, and what keys and values are kept as; empty: the CPU's order, the model's
        dtype.
        """
        ...

    def run(self, batch: StepBatch) -> Tensor:
        """The logits [rows wanted, vocab] of one step, float32, on every rank."""
        ...

    def warm_up(self, max_rows: int) -> None: ...

    def close(self) -> None:
        """Frees what goes before the cache. Nothing is run after it."""
        ...


class HfDevice(Protocol):
    """The kernels that Hugging Face's modules run with on a kind of device."""

    @property
    def row_invariant(self) -> bool:
        """Whether no trial of its kernels found a row that depends on its neighbours."""
        ...

    @property
    def kv_bytes_per_token(self) -> int: ...

    def linear(self, weight: Tensor, bias: Tensor | None) -> Kernel:
        """The kernel of a linear, which takes the weight."""
        ...

    def make_sampler(self) -> StepSampler: ...

    def warm_up_sampler(self, max_rows: int) -> None: ...

    def allocate(
        self, num_blocks: int, block_size: int, progress: ProgressCounter
    ) -> tuple[TiledCache | KVCache, HfSteps]:
        """A cache, and what runs steps over it. Raises ValueError where the block size does not fit."""
        ...
