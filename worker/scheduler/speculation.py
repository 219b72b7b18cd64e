"""Speculative decoding, the scheduler's side: the sequences with drafts in a step, the number of drafts, and their
acceptance.

A draft token is kept only if the model itself samples the same one there (`Sequence.advance`), so drafts change only
the speed. The limits: only sequences that decode get drafts, within the step's tokens and rows of logits, within their
own maximum length, and in blocks that are free: no sequence is preempted for a draft.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from holdfast.worker.config import SchedulerConfig, SpeculationConfig
from holdfast.worker.scheduler.batching import Share, StepLimits
from holdfast.worker.scheduler.drafters import (
    DraftLength,
    DraftModelProgress,
    NgramProposer,
    SuffixProposer,
    longest_for,
)
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence
from holdfast.worker.step_plan import Drafting, ScheduledSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Drafts in a sequence's share of a step: draft tokens, or the number that the runner shall draft."""

    token_ids: tuple[int, ...] = ()
    drafting: Drafting | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) if self.drafting is None else self.drafting.num_drafts


NO_DRAFTS: Final = Drafts()


class Drafter(Protocol):
    """Chooses drafts for the sequences of a step. `drafts` is called for each step, then, unless it returned an empty
    list, `settle` for each of the step's sequences that is still there; `forget` at any time.
    """

    @property
    def num_speculative_tokens(self) -> int:
        """The most draft tokens for one sequence in one step."""

    @property
    def num_remembered(self) -> int:
        """Number of sequences with state here; 0 when none is alive."""

    def drafts(self, shares: list[Share], queues: SequenceQueues, limits: StepLimits) -> list[Drafts]:
        """Drafts for each share of a step, within the step's limits and the blocks that are free. Empty: no sequence
        gets any, and the step's result is not reported back.
        """

    def settle(
        self, sequence: Sequence, scheduled: ScheduledSequence, gained: tuple[int, ...], queues: SequenceQueues
    ) -> None:
        """Takes the result of a step for a running sequence: which of its drafts were accepted."""

    def forget(self, sequence: Sequence) -> None:
        """Drops the state of a sequence that has ended or was aborted. It may never have been seen."""


class Proposer(Protocol):
    """Guesses tokens while a step is planned. Its guesses need not be right, nor the same in two replicas."""

    def propose(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Guesses at most `num_tokens` (at least one) next tokens. Called at most once for each step."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or was aborted: nothing of its state is kept. It may never have been seen."""
        ...


_LOOKUP_PAYS_FROM: Final = 0.15  # acceptance rate
_MODEL_PAYS_FROM: Final = 0.3
"""Acceptance rate from which drafts pay: a wrong draft costs a row of the step, or also a draft-model pass."""


def max_num_draws(scheduler: SchedulerConfig, speculation: SpeculationConfig) -> int:
    """Rows of logits that a step may ask for: one for each sequence, and one full draft. More sequences draft less."""
    return scheduler.max_num_seqs + speculation.max_num_drafts


class Speculation:
    """The drafts of one scheduler's sequences.

    `drafts` is called for each step, then, where there are some, `settle` for each of its sequences that is still
    there; `forget` at any time.
    """

    def __init__(self, config: SpeculationConfig, scheduler: SchedulerConfig, proposer: Proposer | None = None) -> None:
        """`proposer` takes the place of the configured one."""
        self.num_speculative_tokens = config.max_num_drafts
        self._max_num_draws = max_num_draws(scheduler, config)
        drafts_by_model = config.speculative in ("draft", "mtp") and proposer is None
        self._model = DraftModelProgress(rereads=config.speculative == "mtp") if drafts_by_model else None
        self._proposer = proposer or _proposer(config)
        self._lengths: dict[int, DraftLength] = {}  # by sequence id
        self._lent: dict[int, int] = {}  # blocks for drafts of the outstanding step, by sequence id

    @property
    def enabled(self) -> bool:
        return self._proposer is not None or self._model is not None

    @property
    def num_remembered(self) -> int:
        """Number of sequences with data here; 0 when none is alive."""
        return len(self._lengths)

    def drafts(self, shares: list[Share], queues: SequenceQueues, limits: StepLimits) -> list[Drafts]:
        """Drafts for each share of a step, from what its sequences leave of tokens, rows and blocks; empty for none.

        For a draft model, whose guesses take time, a batch counts as twice as large.
        """
        self._lent = {}
        if not self.enabled:
            return []
        num_decoding = sum([_decodes(sequence) for sequence, _ in shares])
        longest = min(limits.num_speculative_tokens, longest_for(num_decoding * (1 if self._model is None else 2)))
        if longest == 0 and self._model is None:  # a draft model has to note how far each sequence is
            return []
        budget = _DraftBudget(
            longest=longest,
            num_tokens=limits.max_num_batched_tokens - sum(num_tokens for _, num_tokens in shares),
            num_draws=self._max_num_draws - sum(num_tokens == s.num_uncomputed_tokens for s, num_tokens in shares),
            num_to_read=limits.max_num_batched_tokens,
        )
        return [self._drafts(sequence, num_tokens, budget, queues) for sequence, num_tokens in shares]

    def settle(
        self, sequence: Sequence, scheduled: ScheduledSequence, gained: tuple[int, ...], queues: SequenceQueues
    ) -> None:
        """Take in a step's results for a running sequence's drafts, and free the blocks of rejected drafts."""
        num_lent = self._lent.pop(sequence.sequence_id, 0)
        num_needed = queues.allocator.num_blocks_for(len(sequence.token_ids))
        if num_surplus := min(num_lent, max(0, len(sequence.block_ids) - num_needed)):
            queues.shrink(sequence, num_surplus)
        if queues.windows is not None and sequence.window is not None and scheduled.num_draws > 1:
            queues.windows.shrink(sequence.window, len(sequence.token_ids))
        if scheduled.num_draws > 1:
            drafts = scheduled.token_ids[1 - scheduled.num_draws :]
            num_accepted = sum(draft == token_id for draft, token_id in zip(drafts, gained, strict=False))
            if (length := self._lengths.get(sequence.sequence_id)) is not None:
                length.observe(len(drafts), num_accepted)
            sequence.num_draft_tokens += len(drafts)
            sequence.num_accepted_tokens += num_accepted
            queues.counts.num_draft_tokens += len(drafts)
            queues.counts.num_accepted_tokens += num_accepted

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: drop its data, except what a proposer may learn."""
        self._lengths.pop(sequence.sequence_id, None)
        if self._proposer is not None:
            self._proposer.forget(sequence)
        if self._model is not None:
            self._model.forget(sequence)

    def _drafts(self, sequence: Sequence, num_tokens: int, budget: "_DraftBudget", queues: SequenceQueues) -> Drafts:
        wanted = self._num_wanted(sequence, budget) if _decodes(sequence) else 0
        if self._model is not None:
            return self._model_drafts(
                self._model, sequence, num_tokens, self._with_slots(sequence, wanted, queues), budget
            )
        if wanted == 0 or self._proposer is None:
            return NO_DRAFTS
        guesses = self._proposer.propose(sequence, wanted)
        drafts = Drafts(token_ids=guesses[: self._with_slots(sequence, len(guesses), queues)])
        budget.take(drafts.num_tokens)
        return drafts

    def _model_drafts(
        self, model: DraftModelProgress, sequence: Sequence, num_tokens: int, wanted: int, budget: "_DraftBudget"
    ) -> Drafts:
        """Like `_drafts`, by the draft model. It always computes prompts; outputs only when it is to draft."""
        if not model.rereads and (budget.longest == 0 or (wanted == 0 and _decodes(sequence))):
            model.settle(sequence)
            return NO_DRAFTS
        end = sequence.num_computed_tokens + num_tokens
        drafting = model.drafting(sequence, end, wanted, budget.num_to_read)
        if drafting is None:
            return NO_DRAFTS
        budget.num_to_read -= len(drafting.token_ids)
        budget.take(drafting.num_drafts)
        return Drafts(drafting=drafting)

    def _num_wanted(self, sequence: Sequence, budget: "_DraftBudget") -> int:
        """Tokens to guess: never more than could be kept, since each verification also draws one itself."""
        longest = min(
            budget.longest, budget.num_tokens, budget.num_draws, sequence.max_len - len(sequence.token_ids) - 1
        )
        if longest <= 0:
            return 0
        length = self._lengths.get(sequence.sequence_id)
        if length is None:
            pays_from = _LOOKUP_PAYS_FROM if self._model is None else _MODEL_PAYS_FROM
            length = self._lengths[sequence.sequence_id] = DraftLength(pays_from)
        return length.next(longest)

    def _with_slots(self, sequence: Sequence, num_drafts: int, queues: SequenceQueues) -> int:
        """Drafts that have a place in the sequence's blocks, after lending it free ones."""
        if num_drafts == 0:
            return 0
        allocator, num_tokens = queues.allocator, len(sequence.token_ids)
        num_lent = min(
            max(0, queues.num_free),
            max(0, allocator.num_blocks_for(num_tokens + num_drafts) - len(sequence.block_ids)),
        )
        if num_lent:
            queues.grow(sequence, num_lent)
            self._lent[sequence.sequence_id] = num_lent
        num_drafts = min(num_drafts, len(sequence.block_ids) * allocator.block_size - num_tokens)
        return queues.extend_window(sequence, 1 + num_drafts) - 1


@dataclass(slots=True, kw_only=True)
class _DraftBudget:
    """Room left in a step for drafts."""

    longest: int
    num_tokens: int
    num_draws: int
    num_to_read: int
    """Tokens that the draft model may still read."""

    def take(self, num_drafts: int) -> None:
        self.num_tokens -= num_drafts
        self.num_draws -= num_drafts


def _decodes(sequence: Sequence) -> bool:
    return sequence.num_uncomputed_tokens == 1


def _proposer(config: SpeculationConfig) -> Proposer | None:
    if config.speculative == "ngram":
        return NgramProposer(config.ngram_min, config.ngram_max)
    return SuffixProposer(config.suffix_corpus_tokens) if config.speculative == "suffix" else None
