"""Step in flight: who is in a plan whose result is still to come, and what can be foreseen of that result.

While the device runs a step, the next one can be planned for those whose next step depends on nothing but where they
will then be. What may not live here: choosing the next step (`batching.py`), and taking in a result (`scheduler.py`).
"""

from typing import Final

from holdfast.worker.plan.step_plan import StepPlan
from holdfast.worker.scheduling.decode_batch import RowsInFlight
from holdfast.worker.scheduling.queues import SequenceQueues
from holdfast.worker.scheduling.sequence import Sequence, SequenceStatus

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
