"""Logits to tokens, as a pure function.  [signatures first]"""

from collections.abc import Sequence
from torch import Tensor
from worker.plan import DrawParams, StepPlan


def draws_of(plan: StepPlan) -> list[DrawParams]:
    """One DrawParams for each logits row of the plan, in order, with its own output index."""
    raise NotImplementedError


def draw(logits: Tensor, draws: Sequence[DrawParams]) -> list[int]:
    """The token drawn from each row of `logits` [N, vocab]."""
    raise NotImplementedError
