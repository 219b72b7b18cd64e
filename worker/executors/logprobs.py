"""Log-probabilities of tokens that requests name.

They are taken from the logits as the model gave them, and do not affect a draw. The softmax is taken in float64 and
rounded once, so a row does not depend on the others.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.draws import DrawParams
from holdfast.worker.request import TokenLogprob

_CHUNK_VALUES: Final = 2**22
"""Logits that are worked on at a time; each takes a few words of 64 bits."""


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
            values.append(log_softmax(logits[chunk])[at, columns])
        return cls(rows, [draws[row].sampling.logprob_token_ids for row in rows], torch.cat(values))

    def put_into(self, logprobs: Sequence[TokenLogprob | None]) -> list[TokenLogprob | None]:
        """What was told of each row, with the named tokens in place of the best ones."""
        said, values = list(logprobs), iter(self._values.tolist())
        for row, token_ids in self._token_ids.items():
            top = tuple(zip(token_ids, values, strict=False))
            told = said[row]
            said[row] = None if told is None else replace(told, top=top)
        return said


def log_softmax(logits: Tensor) -> Tensor:
    """The log-softmax of each row, taken in float64; a row of odd length gets one more column, of no mass.

    Accelerators read float64 in aligned pairs, and may sum a row that begins within a pair in another order.
    """
    even = torch.nn.functional.pad(logits, (0, logits.shape[1] % 2), value=float("-inf"))
    return torch.log_softmax(even, -1, dtype=torch.float64).float()
