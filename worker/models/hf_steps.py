"""Device interface of the HF backend: kernels for linears, a cache, and steps over it; and paged attention, as a
model's attention modules call it: write the new keys and values, then attend to all.

    model.attach(lambda layer: PagedAttention(specs[layer], partial(kernels.attend, layer), progress))
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from holdfast.worker.executors.cpu.cache import TiledCache
from holdfast.worker.executors.kv_cache import KVCache, KVSpec
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.step_sampler import StepSampler
from holdfast.worker.models.linear import Kernel
from holdfast.worker.progress import ProgressCounter

Attend = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor]
"""query [H, T, D], key [Hkv, T, D], value [Hkv, T, Dv], scaling, sinks [H] -> [T, H, Dv], of the step that was begun.
Keys and values are written first. A query's bits may depend only on its sequence and position.
"""


class PagedAttention:
    """One layer's attention. Hugging Face's attention modules call it through one registered function."""

    def __init__(self, spec: KVSpec, attend: Attend, progress: ProgressCounter) -> None:
        """`progress` moves with every call."""
        self._spec = spec
        self._attend = attend
        self._progress = progress

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        """query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, H, Dv].

        T are the step's tokens in its order. Window, softcap and sinks are those of the layer's spec.
        """
        spec = self._spec
        assert (sliding_window, softcap, s_aux is not None) == (spec.sliding_window, spec.softcap, spec.has_sinks)
        self._progress.tick()
        return self._attend(query[0], key[0], value[0], scaling, s_aux).unsqueeze(0)


class HfSteps(Protocol):
    """Runs steps over one cache, which the model's attention is attached to."""

    @property
    def numerics(self) -> str:
        """Names the order of adding, and what keys and values are kept as; empty: the CPU's order, the model's
        dtype.
        """
        ...

    def run(self, batch: StepBatch) -> Tensor:
        """The logits [rows wanted, vocab] of one step, float32, on every rank."""
        ...

    def warm_up(self, max_rows: int) -> None: ...

    def close(self) -> None:
        """Frees memory that the cache needs. Nothing is run after it."""
        ...


class HfDevice(Protocol):
    """The kernels that Hugging Face's modules run with on a kind of device. A row's bits depend on no other row."""

    @property
    def kv_bytes_per_token(self) -> int: ...

    def linear(self, weight: Tensor, bias: Tensor | None, num_slices: int = 1, *, is_part: bool = False) -> Kernel:
        """See `ProductOf`."""
        ...

    def make_sampler(self) -> StepSampler:
        """A sampler of logits on this device."""
        ...

    def warm_up_sampler(self, max_rows: int) -> None:
        """Compiles the sampler's kernels for up to `max_rows` rows."""
        ...

    def allocate(
        self, num_blocks: int, block_size: int, progress: ProgressCounter
    ) -> tuple[TiledCache | KVCache, HfSteps]:
        """A cache, and the runner of steps over it. Raises ValueError where the block size does not fit."""
        ...
