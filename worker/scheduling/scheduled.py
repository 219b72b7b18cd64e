"""Scheduled sequence: a share of a step as the plan says it, worked out from its sequence.

What may not live here: how many tokens the share has (`batching.py`), and sequences that decode plainly
(`decode_batch.py`).
"""

from holdfast.worker.plan.step_plan import ScheduledSequence
from holdfast.worker.scheduling.drafting import NO_DRAFTS, Drafts
from holdfast.worker.scheduling.prompt_logprobs import prompt_logprob_params
from holdfast.worker.scheduling.sequence import Sequence


def scheduled_sequence(sequence: Sequence, num_tokens: int, drafts: Drafts, block_size: int) -> ScheduledSequence:
    """The next `num_tokens` tokens of a running sequence, and drafts after them."""
    first, block_ids = sequence.num_computed_tokens, sequence.block_ids
    end = first + num_tokens
    draws = end == len(sequence.token_ids)
    num_blocks = -(-(end if drafts is NO_DRAFTS else end + drafts.num_tokens) // block_size)
    prompt_logprobs = None
    if sequence.prompt_logprobs is not None and sequence.num_missing_prompt_logprobs:
        prompt_logprobs = prompt_logprob_params(sequence, num_tokens)
    return ScheduledSequence(
        sequence_id=sequence.sequence_id,
        first_position=first,
        token_ids=(*sequence.token_ids[first:end], *drafts.token_ids),
        block_ids=block_ids if len(block_ids) == num_blocks else block_ids[:num_blocks],
        draw=sequence.draw_params() if draws else None,
        num_draws=1 + len(drafts.token_ids) if draws else 0,
        drafting=drafts.drafting,
        prompt_logprobs=prompt_logprobs,
    )
