"""What there is to tell of a sequence after a step, or at its end.

What may live here: making `TokenDelta`. What may not: deciding when a sequence ends (`sequence.py`, `scheduler.py`).
"""

from holdfast.worker.plan.step_plan import ScheduledSequence
from holdfast.worker.request import FinishReason, TokenDelta, TokenLogprob
from holdfast.worker.scheduling.sequence import Sequence


def advance(
    sequence: Sequence, scheduled: ScheduledSequence, drawn: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
) -> TokenDelta | None:
    """Moves a sequence on by what a step did for it; None if it gained no token.

    Whatever is dropped of the drawn tokens is dropped of their logprobs.
    """
    first_token_index = sequence.num_output_tokens
    token_ids = sequence.advance(scheduled, drawn)
    if not token_ids:
        return None
    return TokenDelta(
        attempt=sequence.attempt,
        first_token_index=first_token_index,
        token_ids=token_ids,
        finish_reason=sequence.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens if first_token_index == 0 else 0,
        logprobs=logprobs[: len(token_ids)],
        prompt_logprobs=sequence.take_prompt_logprobs() if first_token_index == 0 else (),
    )


def last_delta(sequence: Sequence, reason: FinishReason) -> TokenDelta:
    """The end of a request that gains no more tokens."""
    return TokenDelta(
        attempt=sequence.attempt,
        first_token_index=sequence.num_output_tokens,
        token_ids=(),
        finish_reason=reason,
    )
