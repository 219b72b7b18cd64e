"""Prompt log-probabilities: which prompt tokens a step reports them for, and the bound on their number.

Each takes a row of logits, and so memory. What may not live here: computing log-probabilities
(`worker/sampling/logprobs.py`).
"""

from typing import Final

from holdfast.worker.plan.step_plan import PromptLogprobParams
from holdfast.worker.scheduling.sequence import Sequence

MAX_PROMPT_LOGPROBS: Final = 128
"""Most prompt tokens whose logprobs one step reports, all sequences together: each takes a row of logits."""


def num_step_tokens(sequence: Sequence) -> int:
    """How many of a running sequence's tokens one step may compute."""
    num_tokens = sequence.num_uncomputed_tokens
    return min(num_tokens, MAX_PROMPT_LOGPROBS) if sequence.num_missing_prompt_logprobs else num_tokens


def prompt_logprob_params(sequence: Sequence, num_tokens: int) -> PromptLogprobParams | None:
    """The prompt logprobs to compute with the next `num_tokens` tokens of a sequence; None: there are none."""
    num_logprobs = sequence.request.sampling_params.prompt_logprobs
    rows = prompt_logprob_rows(sequence, num_tokens)
    if num_logprobs is None or not rows:
        return None
    token_ids = tuple(sequence.token_ids[rows.start + 1 : rows.stop + 1])
    return PromptLogprobParams(
        first_row=rows.start - sequence.num_computed_tokens, token_ids=token_ids, num_logprobs=num_logprobs
    )


def bound_prompt_logprobs(shares: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
    """The shares of a step, cut so that it reports at most `MAX_PROMPT_LOGPROBS` prompt logprobs, in order.

    Those that are asked for none stay as they are. One sequence alone is within the bound already.
    """
    num_asking = 0
    for sequence, _ in shares:
        if sequence.prompt_logprobs is not None and sequence.num_missing_prompt_logprobs:
            num_asking += 1
    if num_asking < 2:
        return shares
    left, bounded = MAX_PROMPT_LOGPROBS, []
    for sequence, num_tokens in shares:
        rows = prompt_logprob_rows(sequence, num_tokens)
        if len(rows) > left:
            num_tokens = rows.start + left - sequence.num_computed_tokens
        left -= min(len(rows), left)
        if num_tokens > 0:
            bounded.append((sequence, num_tokens))
    return bounded


def prompt_logprob_rows(sequence: Sequence, num_tokens: int) -> range:
    """Positions among the next `num_tokens` whose logits are needed for the logprob of the token after them."""
    end = sequence.num_computed_tokens + num_tokens
    first_missing = sequence.num_prompt_tokens - sequence.num_missing_prompt_logprobs
    return range(max(sequence.num_computed_tokens, first_missing - 1), min(end, sequence.num_prompt_tokens - 1))
