"""Log-probabilities of drawn tokens and of prompt tokens in PyTorch, with ranks and the best alternatives: an oracle.

They are taken from the logits as the model gave them, and do not affect a draw. The softmax is taken in float64 and
rounded once, and tokens are put in one total order.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.draws import DrawParams
from holdfast.worker.executors.step_sampler import log_softmax
from holdfast.worker.request import TokenLogprob
from holdfast.worker.step_plan import PromptLogprobParams

_CHUNK_VALUES: Final = 2**22
"""Logits that are worked on at a time; each takes a few words of 64 bits."""


def token_logprobs(logits: Tensor, draws: Sequence[DrawParams], token_ids: Sequence[int]) -> list[TokenLogprob | None]:
    """What each row of `logits` [N, vocab], float32, says of the token drawn from it, one of `token_ids` [N].

    None for a row that does not ask; an empty list where no row does.
    """
    asking = [row for row, params in enumerate(draws) if params.sampling.logprobs is not None]
    if not asking:
        return []
    said: list[TokenLogprob | None] = [None] * len(draws)
    counts = [draws[row].num_logprobs or 0 for row in asking]
    for row, item in zip(asking, _say(logits, asking, [token_ids[row] for row in asking], counts), strict=True):
        said[row] = item
    return said


def token_logprobs_of_prompts(logits: Tensor, wanted: Sequence[PromptLogprobParams]) -> list[TokenLogprob]:
    """What the rows of `logits` [N, vocab], float32, say of the prompt tokens that are asked for, N in all."""
    token_ids = [token_id for params in wanted for token_id in params.token_ids]
    counts = [params.num_logprobs for params in wanted for _ in params.token_ids]
    return _say(logits, range(len(token_ids)), token_ids, counts)


def _say(logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """What each of some rows says of its token and of so many best ones, a few rows at a time."""
    said: list[TokenLogprob] = []
    rows_at_once = max(1, _CHUNK_VALUES // logits.shape[1])
    for start in range(0, len(rows), rows_at_once):
        chunk = slice(start, start + rows_at_once)
        said += _read_off(logits[list(rows[chunk])], token_ids[chunk], counts[chunk])
    return said


def _read_off(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """As `_say`, for all of the rows [N, vocab] at once."""
    logprobs = log_softmax(logits)
    places = _order(logits)
    drawn = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    ranks = (places > places.gather(1, drawn)).sum(1) + 1
    best = places.topk(min(max(counts), logits.shape[1])).indices
    columns = (logprobs.gather(1, drawn).squeeze(1), ranks, best, logprobs.gather(1, best))
    return [
        TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, top=tuple(zip(ids, values, strict=True))[:count])
        for token_id, count, logprob, rank, ids, values in zip(
            token_ids, counts, *(column.tolist() for column in columns), strict=True
        )
    ]


def _order(logits: Tensor) -> Tensor:
    """A different int64 for each token of a row of `logits` [N, vocab]: the larger, the better its rank.

    The upper half is the logit: the bits of a float32 are in its order once those of negative ones are turned over. The
    lower half puts equal logits in the order of their token ids.
    """
    bits = (logits + 0.0).view(torch.int32)  # the sum makes -0.0 the 0.0 that it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) - torch.arange(logits.shape[1], device=logits.device)
