"""A trial of an attention kernel finds out when a query's bits depend on its company."""

import pytest
import torch
from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.executors.kv_cache import KVSpec, LayerCache
from holdfast.worker.models.gpu_attention_trial import rows_agree

SPEC = KVSpec(num_heads=1, num_kv_heads=1, key_dim=64, value_dim=64)


class OneByOne:
    """Attends token by token, so the same in any company; except that it sums backwards in steps of `odd` tokens."""

    def __init__(self, *, odd: int | None, backwards_over: str) -> None:
        self._odd = odd
        self._backwards_over = backwards_over

    def begin(self, batch: StepBatch) -> None:
        self._positions = batch.positions.tolist()

    def attend(self, layer: LayerCache, query: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        backwards_over = self._backwards_over if len(query) == self._odd else "nothing"
        return torch.stack(
            [self._one(layer, *pair, scaling, backwards_over) for pair in zip(self._positions, query, strict=True)]
        )

    def _one(self, layer: LayerCache, position: int, query: Tensor, scaling: float, backwards_over: str) -> Tensor:
        keys, values = (pool.flatten(0, 1)[: position + 1].float() for pool in (layer.keys, layer.values))
        if backwards_over == "keys":
            keys, values = keys.flip(0), values.flip(0)
        products = query.float() * keys
        scores = (products.flip(2) if backwards_over == "dimensions" else products).sum(2)
        scores *= scaling
        weights = (scores - scores.amax(0)).exp().to(query.dtype).float()
        return ((weights.unsqueeze(2) * values).sum(0) / weights.sum(0).unsqueeze(1)).to(query.dtype)


@pytest.mark.parametrize(
    ("odd", "backwards_over"),
    [
        *((odd, "dimensions") for odd in (1, 3, 16, 48)),
        *((odd, "keys") for odd in (16, 48)),
        *(pytest.param(odd, "keys", marks=pytest.mark.slow) for odd in (1, 3)),
    ],
)
def test_a_trial_notices_another_order_of_summing(odd, backwards_over):
    """In bfloat16, where ordinary numbers would hide it."""
    kernel = OneByOne(odd=odd, backwards_over=backwards_over)
    assert not rows_agree(kernel, SPEC, torch.bfloat16, torch.device("cpu"))


def test_a_trial_is_content_with_a_kernel_that_never_differs():
    assert rows_agree(OneByOne(odd=None, backwards_over="keys"), SPEC, torch.bfloat16, torch.device("cpu"))
