"""NaN and infinity checks of logits rows: no token can be drawn from a row that is not finite.

What may live here: finding such rows, and replacing them. What may not: what happens to their requests
(`worker/scheduling/scheduler.py`, `worker/engine_core/lost_numbers.py`).
"""

import torch
from torch import Tensor


def broken_rows(logits: Tensor) -> list[int]:
    """The rows of `logits` [N, vocab] that have a NaN, or whose best logit is infinite. One pass over them."""
    if not logits.shape[0]:
        return []
    best = logits.amax(1)  # a NaN anywhere in a row is the row's
    rows: list[int] = torch.nonzero(~best.isfinite()).flatten().tolist()
    return rows


def with_zeros(logits: Tensor, rows: list[int]) -> Tensor:
    """A copy of `logits` with zeros in these rows, so that whatever reads them finds numbers. The others are as they
    were, bit for bit."""
    mended = logits.clone()
    mended[rows] = 0.0
    return mended
