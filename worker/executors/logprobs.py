"""Log-probabilities of drawn tokens and of prompt tokens, with ranks and the best alternatives.

They are taken from the logits as the model gave them, and do not affect a draw. Rows that ask for none cost nothing. A
row does not depend on the others: the softmax is taken in float64 and rounded once, and tokens are put in one total
order, so which of several equal logits comes first does not depend on the device's search.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.draws import DrawParams
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


class ChosenLogprobs:
    """Log-probabilities of tokens that draws name, of all rows together: taken where the logits are, read later.

    They are PyTorch's on every device: a native sampler's own may differ in the last bit.
    """

    def __init__(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]], values: Tensor) -> None:
        """`values`: those of all `token_ids` in turn, float32."""
        self._token_ids = dict(zip(rows, token_ids, strict=True))
        self._values = values

    @classmethod
    def of(cls, logits: Tensor, draws: Sequence[DrawParams]) -> "ChosenLogprobs | None":
        """Of the rows of `logits` [N, vocab], float32, one for each draw; None where no draw names any."""
        rows = [row for row, params in enumerate(draws) if params.sampling.logprob_token_ids]
        if not rows:
            return None
        rows_at_once, values = max(1, _CHUNK_VALUES // logits.shape[1]), list[Tensor]()
        for start in range(0, len(rows), rows_at_once):
            chunk = rows[start : start + rows_at_once]
            ids = [draws[row].sampling.logprob_token_ids for row in chunk]
            places = [(at, token_id) for at, own in enumerate(ids) for token_id in own]
            at, columns = torch.tensor(places, device=logits.device).T
            values.append(_log_softmax(logits[chunk])[at, columns])
        return cls(rows, [draws[row].sampling.logprob_token_ids for row in rows], torch.cat(values))

    def put_into(self, logprobs: Sequence[TokenLogprob | None]) -> list[TokenLogprob | None]:
        """What was told of each row, with the named tokens in place of the best ones."""
        said, values = list(logprobs), iter(self._values.tolist())
        for row, token_ids in self._token_ids.items():
            top = tuple(zip(token_ids, values, strict=False))
            told = said[row]
            said[row] = None if told is None else replace(told, top=top)
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
    logprobs = _log_softmax(logits)
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


def _log_softmax(logits: Tensor) -> Tensor:
    """The log-softmax of each row, taken in float64; a row of odd length gets one more column, of no mass.

    Accelerators read float64 in aligned pairs, and may sum a row that begins within a pair in another order.
    """
    even = torch.nn.functional.pad(logits, (0, logits.shape[1] % 2), value=float("-inf"))
    return torch.log_softmax(even, -1, dtype=torch.float64).float()


def _order(logits: Tensor) -> Tensor:
    """A different int64 for each token of a row of `logits` [N, vocab]: the larger, the better its rank.

    The upper half is the logit: the bits of a float32 are in its order once those of negative ones are turned over. The
    lower half puts equal logits in the order of their token ids.
    """
    bits = (logits + 0.0).view(torch.int32)  # the sum makes -0.0 the 0.0 that it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) - torch.arange(logits.shape[1], device=logits.device)
