"""Log-probabilities of one token as vLLM writes them: candidates by token id, for the doors that tell them so.

What may not live here: OpenAI's shapes (`http/choices.py`), texts of tokens (`router/text/token_table.py`).
"""

from typing import Any, Final

from holdfast.router.text.token_table import TokenTable
from holdfast.worker.request import TokenLogprob

_LEAST: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def logprob_of(logprob: float) -> float:
    """As JSON can say it."""
    return max(logprob, _LEAST)


def by_token_id(item: TokenLogprob, tokens: TokenTable, *, are_best: bool = True) -> dict[str, dict[str, Any]]:
    """The candidates at one position, the token itself among them. Unless they `are_best`, only its rank is known."""
    ranked: dict[int, tuple[float, int | None]] = {
        token_id: (logprob, rank if are_best else None) for rank, (token_id, logprob) in enumerate(item.top, 1)
    }
    ranked[item.token_id] = item.logprob, item.rank
    return {
        str(token_id): {"logprob": logprob_of(logprob), "rank": rank, "decoded_token": tokens.name_of(token_id)}
        for token_id, (logprob, rank) in ranked.items()
    }
