"""Steps of an executor: which tokens of which sequences, and their blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.step_plan import BlockCopy, ScheduledSequence, StepPlan


@dataclass
class Part:
    """One sequence's share of a step."""

    first: int
    token_ids: Sequence[int]
    blocks: Sequence[int]
    second_start: int = 0


def batch_of(parts: Sequence[Part], block_size: int, copies: Sequence[BlockCopy] = ()) -> StepBatch:
    """A step that wants the logits of all tokens."""
    sequences = tuple(
        ScheduledSequence(
            sequence_id=number,
            first_position=part.first,
            token_ids=tuple(part.token_ids),
            block_ids=tuple(part.blocks[: -(-(part.first + len(part.token_ids)) // block_size)]),
            draw=None,
            num_draws=len(part.token_ids),
            second_start=part.second_start,
        )
        for number, part in enumerate(parts)
    )
    return StepBatch.of(StepPlan(step_id=0, others=sequences, block_copies=tuple(copies)))
