"""Shares of a step that are no plain decode rows: how prompts, drafts and draws of all kinds are planned and committed.

What may live here: a share as the plan says it, the way from its result to its delta, and what queues, tenants and
drafter learn of that. What may not: how many tokens it has (`batching.py`), rows (`decode_batch.py`), which steps are
in flight, and the end of sequences (`scheduler.py`).
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from holdfast.worker.plan.step_plan import ScheduledSequence, StepResult
from holdfast.worker.request import TokenDelta
from holdfast.worker.scheduling.drafting import NO_DRAFTS, Drafter, Drafts
from holdfast.worker.scheduling.prompt_logprobs import prompt_logprob_params
from holdfast.worker.scheduling.queues import SequenceQueues
from holdfast.worker.scheduling.sequence import Sequence, SequenceStatus


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


class ShareCommit:
    """Of one scheduler's steps."""

    def __init__(
        self, queues: SequenceQueues, drafter: Drafter | None, block_size: int, drop_broken: Callable[[Sequence], None]
    ) -> None:
        """`drop_broken` is called for a sequence that no token can follow, before the next one is looked at:
        nobody may find its blocks."""
        self.num_tokens_recomputed = 0
        """Tokens that were computed again after a preemption."""
        self._queues = queues
        self._drafter = drafter
        self._block_size = block_size
        self._drop_broken = drop_broken

    def take(
        self, sequences: list[Sequence], shares: SequenceOf[ScheduledSequence], result: StepResult
    ) -> list[TokenDelta]:
        """A delta for each sequence that gained tokens. Those that run no longer are passed over."""
        deltas = []
        logprobs = result.logprobs or ((),) * len(sequences)
        prompt_logprobs = result.prompt_logprobs or ((),) * len(sequences)
        for sequence, scheduled, drawn, likely, likely_prompt in zip(
            sequences, shares, result.token_ids, logprobs, prompt_logprobs, strict=True
        ):
            assert len(drawn) == scheduled.num_draws, f"{len(drawn)} tokens for {scheduled.num_draws} draws"
            num_lost = max(0, sequence.num_discarded_tokens - scheduled.first_position)
            self.num_tokens_recomputed += min(num_lost, len(scheduled.token_ids))
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            if likely_prompt and sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs += likely_prompt
            if len(scheduled.token_ids) == scheduled.num_draws == 1 and sequence.num_output_tokens > 0:
                delta = sequence.decode(drawn, likely)
            else:
                num_before = sequence.num_uncomputed_tokens
                delta = sequence.commit(scheduled, drawn, likely)
                self._queues.num_uncomputed_tokens += sequence.num_uncomputed_tokens - num_before
            if sequence.is_broken:
                self._drop_broken(sequence)
                continue
            if delta is not None:
                deltas.append(delta)
            self._settle(sequence, scheduled, delta.token_ids if delta else ())
        return deltas

    def _settle(self, sequence: Sequence, scheduled: ScheduledSequence, gained: tuple[int, ...]) -> None:
        """Charges the tenant for the tokens that a sequence gained in a step, and caches blocks that became full."""
        sequence.tenant.charge(0, len(gained))
        if self._drafter is not None:
            self._drafter.settle(sequence, scheduled, gained, self._queues)
        if scheduled.first_position % self._block_size + len(scheduled.token_ids) >= self._block_size:
            self._queues.store_full_blocks(sequence, scheduled.first_position)
