"""Drafter interface: what speculative decoding adds to a step.

What may live here: the contract. What may not: proposing drafts, and when they pay (`worker/speculation/`).
"""

from dataclasses import dataclass
from typing import Final, Protocol

from holdfast.worker.plan.step_plan import Drafting, ScheduledSequence
from holdfast.worker.scheduling.batching import Share
from holdfast.worker.scheduling.queues import SequenceQueues
from holdfast.worker.scheduling.sequence import Sequence
from holdfast.worker.scheduling.step_limits import StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """What speculation adds to a sequence's share of a step: draft tokens, or how many the runner shall draft."""

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

    num_draft_tokens: int
    """Draft tokens so far."""
    num_accepted_tokens: int
    """Draft tokens that were accepted."""

    @property
    def num_speculative_tokens(self) -> int:
        """The most draft tokens for one sequence in one step."""

    @property
    def num_remembered(self) -> int:
        """Sequences that it has state of; 0 when none is alive."""

    def drafts(self, shares: list[Share], queues: SequenceQueues, limits: StepLimits) -> list[Drafts]:
        """Drafts for each share of a step, within the step's limits and the blocks that are free. Empty: nobody gets
        any, and what becomes of the step is of no interest."""

    def settle(
        self, sequence: Sequence, scheduled: ScheduledSequence, gained: tuple[int, ...], queues: SequenceQueues
    ) -> None:
        """Takes the result of a step for a running sequence: which of its drafts were accepted."""

    def forget(self, sequence: Sequence) -> None:
        """Drops the state of a sequence that has ended or was aborted. It may never have been seen."""
