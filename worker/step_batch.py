"""What every rank needs of a plan, as one int64 array.  [signatures first]"""

from dataclasses import dataclass
import numpy as np
from numpy.typing import NDArray
from worker.plan import StepPlan

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    token_ids: IntArray  # [T] packed in plan order
    positions: IntArray  # [T] absolute
    first_positions: IntArray  # [S]
    num_tokens: IntArray  # [S]
    num_draws: IntArray  # [S]
    block_ids: IntArray  # ragged block tables, end to end
    num_blocks: IntArray  # [S]
    logits_rows: IntArray  # [R] rows of T that logits are wanted for, in plan order

    @staticmethod
    def pack(plan: StepPlan) -> IntArray:
        """One int64 array; array[0] = number of sequences >= 1, so messages that start with <= 0 are free for control."""
        raise NotImplementedError

    @classmethod
    def unpack(cls, array: IntArray) -> "StepBatch":
        raise NotImplementedError
