"""Paged attention, as a model's attention modules call it: write the new keys and values, then attend to all.

model.attach(lambda layer: PagedAttention(specs[layer], partial(kernels.attend, layer), progress))
"""

from collections.abc import Callable

from torch import Tensor

from holdfast.worker.executors.kv_cache import KVSpec
from holdfast.worker.progress import ProgressCounter

Attend = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor]
"""query [H, T, D], key [Hkv, T, D], value [Hkv, T, Dv], scaling, sinks [H] -> [T, H, Dv], of the step that was begun.
Keys and values are written first. A query's bits may depend on its sequence and position, on nothing else.
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
