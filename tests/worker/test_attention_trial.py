"""A trial of an attention kernel finds out when a query's bits depend on its company."""

import pytest
import torch
from torch import Tensor

from worker.attention.trial import rows_agree
from worker.kv_cache import KVSpec, LayerCache
from worker.step_batch import StepBatch


class OneByOne:
    """Attends token by token, so the same in any company; except that it sums backwards in steps of `odd` tokens."""

    def __init__(self, *, odd: int | None, backwards_over: str) -> None:
        self._odd = odd
        self._flip_dim = {"keys": 0, "dimensions": 2}[backwards_over]

    def begin(self, batch: StepBatch) -> None:
        self._positions = batch.positions.tolist()

    def attend(self, layer: LayerCache, query: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        is_backwards = len(query) == self._odd
        return torch.stack(
            [self._one(layer, *pair, scaling, is_backwards) for pair in zip(self._positions, query, strict=True)]
        )

    def _one(self, layer: LayerCache, position: int, query: Tensor, scaling: float, is_backwards: bool) -> Tensor:
        keys, values = (pool.flatten(0, 1)[: position + 1].float() for pool in (layer.keys, layer.values))
        products = query.float() * keys
        scores = (products.flip(self._flip_dim) if is_backwards else products).sum(2)
        terms = torch.softmax(scores * scaling, 0).unsqueeze(2) * (values.flip(0) if is_backwards else values)
        return terms.sum(0).to(query.dtype)


@pytest.mark.parametrize("backwards_over", ["keys", "dimensions"])
@pytest.mark.parametrize("odd", [1, 3, 16, 48])
def test_a_trial_notices_another_order_of_summing(odd, backwards_over):
    """In bfloat16, where ordinary numbers would hide it."""
    spec = KVSpec(num_heads=2, num_kv_heads=2, key_dim=16, value_dim=16)
    kernel = OneByOne(odd=odd, backwards_over=backwards_over)
    assert not rows_agree(kernel, spec, torch.bfloat16, torch.device("cpu"))


def test_a_trial_is_content_with_a_kernel_that_never_differs():
    spec = KVSpec(num_heads=2, num_kv_heads=2, key_dim=16, value_dim=16)
    assert rows_agree(OneByOne(odd=None, backwards_over="keys"), spec, torch.bfloat16, torch.device("cpu"))
