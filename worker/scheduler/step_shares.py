"""Shares of a step that are no plain decode rows: how prompts,
drafts and draws of all kinds are planned and committed.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Final

from holdfast.worker.request import TokenDelta
from holdfast.worker.scheduler.decode_batch import RowsInFlight
from holdfast.worker.scheduler.prompt_sharing import prompt_logprob_params
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence, SequenceStatus
from holdfast.worker.scheduler.speculation import NO_DRAFTS, Drafter, Drafts
from holdfast.worker.step_plan import ScheduledSequence, StepPlan, StepResult


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
            self._queues.counts.num_tokens_recomputed += min(num_lost, len(scheduled.token_ids))
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


MAX_SHARE_HELD_UP: Final = 1 / 8
"""Of the sequences in a step, at most so many may be held up by the next one's being planned ahead. Who is left out
gets its next token a whole step later; the others gain the host's part of a step, which is a fraction of it."""


class StepInFlight:
    """A plan that was handed out and is not committed."""

    __slots__ = ("is_foreseen", "left_out", "plan", "rows", "sequences")

    def __init__(self, plan: StepPlan, rows: RowsInFlight, sequences: list[Sequence]) -> None:
        """`rows` are the sequences of the plan's decodes, the first of all its `sequences`."""
        self.plan = plan
        self.rows = rows
        self.sequences = sequences
        """All of them, in the order of the plan."""
        self.is_foreseen = False
        self.left_out: list[Sequence] = []
        """Of those that were looked at, who awaits the result."""

    def foresee(self, queues: SequenceQueues) -> None:
        """Takes the step as done, for all whose next step can be planned without its result. Once."""
        assert not self.is_foreseen, "a step is foreseen once"
        self.is_foreseen = True
        for sequence in self.rows.sequences:
            self._foresee(sequence, 1, 1)
        for sequence, scheduled in zip(self.sequences[len(self.rows.sequences) :], self.plan.others, strict=True):
            num_before = sequence.num_uncomputed_tokens
            self._foresee(sequence, len(scheduled.token_ids), scheduled.num_draws)
            queues.num_uncomputed_tokens += sequence.num_uncomputed_tokens - num_before

    @property
    def holds_up_too_many(self) -> bool:
        """Whether too many of those who can go on only after this step would miss the next one."""
        num_held_up = sum(not sequence.is_about_to_end for sequence in self.left_out)
        return num_held_up > MAX_SHARE_HELD_UP * len(self.sequences)

    def _foresee(self, sequence: Sequence, num_tokens: int, num_draws: int) -> None:
        if sequence.status is SequenceStatus.RUNNING and not sequence.foresee(num_tokens, num_draws):
            self.left_out.append(sequence)
