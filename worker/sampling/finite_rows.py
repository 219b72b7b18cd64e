"""Rows of logits that are numbers, and those that are not: what no token can be drawn from.

What may live here: finding them, and standing in for them. What may not: what becomes of their requests
(`scheduler.py`, `engine_core.py`).
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
