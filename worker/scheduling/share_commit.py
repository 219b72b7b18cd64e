"""Share commit: takes in what a step made of shares that are no plain decode rows: prompts, drafts, draws of all kinds.

What may live here: the way from such a share's result to its delta, and what queues, tenants and drafter learn of it.
What may not: rows (`decode_batch.py`), which steps are in flight, and the end of sequences (`scheduler.py`).
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from holdfast.worker.plan.step_plan import ScheduledSequence, StepResult
from holdfast.worker.request import TokenDelta
from holdfast.worker.scheduling.drafting import Drafter
from holdfast.worker.scheduling.queues import SequenceQueues
from holdfast.worker.scheduling.sequence import Sequence, SequenceStatus


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
