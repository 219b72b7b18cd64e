"""Outputs of prompts themselves: log-probabilities of their tokens, and their pooled states.

A step computes a part of either; the sequence's delta reports all of it.
"""

from typing import Final

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.pooling import NOT_FINITE, PoolingKind, PoolShare
from holdfast.worker.request import FinishReason, TokenDelta
from holdfast.worker.scheduler.kept_prefixes import tokens_to_next_cut
from holdfast.worker.scheduler.sequence import Sequence
from holdfast.worker.step_plan import PromptLogprobParams, ScheduledSequence

MAX_PROMPT_LOGPROBS: Final = 128
"""Most prompt tokens whose logprobs one step reports, all sequences together: each takes a row of logits."""


def num_step_tokens(sequence: Sequence) -> int:
    """Tokens of a running sequence that one step may compute."""
    num_tokens = tokens_to_next_cut(sequence) if sequence.cuts else sequence.num_uncomputed_tokens
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

    Sequences without requested prompt outputs are unchanged. One sequence alone is within the bound already.
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


def begin_pooling(sequence: Sequence, kind: PoolingKind | None, is_whole: bool) -> None:
    """A pooling request begins: its prompt is pooled, and nothing drawn after it. `kind` is the model's; `is_whole`:
    one step computes it all.

    Raises `InvalidRequestError` where the model is not pooled.
    """
    if kind is None:
        raise InvalidRequestError("pooling", sequence.request.pooling, "is not possible: the model generates text")
    sequence.pool_rows = kind.rows(sequence.num_prompt_tokens)
    sequence.is_whole = is_whole
    sequence.max_len = sequence.num_prompt_tokens + 1


def pool_share(sequence: Sequence, num_tokens: int) -> PoolShare | None:
    """Part of the next `num_tokens` tokens of a sequence in its pooling; None: it is not pooled."""
    rows, params, first = sequence.pool_rows, sequence.request.pooling, sequence.num_computed_tokens
    if rows is None or params is None:
        return None
    end = first + num_tokens
    begin_row, end_row = (min(max(place, first), end) - first for place in (rows.start, rows.stop))
    before = sequence.pooled if first > rows.start else b""
    return PoolShare(params, begin_row, end_row, len(rows), before, end == sequence.num_prompt_tokens)


def commit_pooled(sequence: Sequence, scheduled: ScheduledSequence, pooled: bytes | None) -> TokenDelta | None:
    """Takes a step's pooled values of a sequence, None if nothing; returns the delta to report after the last one."""
    assert scheduled.pool is not None, "it was pooled"
    sequence.num_computed_tokens = scheduled.first_position + len(scheduled.token_ids)
    if pooled is not None:
        sequence.pooled, sequence.is_broken = pooled, pooled == NOT_FINITE
    if sequence.is_broken or not scheduled.pool.is_last:
        return None
    delta = sequence.last_delta(FinishReason.STOP)
    delta.pooled, delta.queued_s = sequence.pooled, sequence.take_queued_s()
    delta.num_cached_tokens, delta.num_disk_tokens = sequence.num_cached_tokens, sequence.num_disk_tokens
    return delta
