"""Router of a mixture of experts, as linears of the dtype that the executor multiplies in."""

from typing import Final

import torch
from torch import Tensor

from holdfast.worker.executors.layout import Linear

_MOST_PARTS: Final = 3
"""Numbers in bfloat16 whose sum any number in float32 is."""


def in_dtype(router: Linear, dtype: torch.dtype) -> Linear:
    """A router in the model's dtype. One in float32 that this does not hold becomes several linears, whose sum it is:
    each has what the ones before left of its weights.
    """
    weight = router.weights[0] if router.weights else None
    if weight is None or weight.dtype == dtype:
        return router
    parts: list[Tensor] = []
    left = weight.detach().float()
    while len(parts) < _MOST_PARTS and (not parts or bool(left.any())):
        parts.append(left.to(dtype))
        left = left - parts[-1].float()
    return Linear(weights=tuple(parts), bias=router.bias)
