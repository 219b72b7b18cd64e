"""Head output of a step: the logits, or only their argmax where greedy decoding needs no more.

What may live here: the data. What may not: drawing (`sampler.py`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from holdfast.worker.sampling.step_sampler import Sampled


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """What the head of a model gives for the rows wanted of a step. One of the first two is there, or the last; on
    ranks that do not lead there may be none."""

    logits: Tensor | None
    """[rows wanted, vocab], float32. The next step may overwrite it."""
    best: list[int] | None
    """The argmax of each row, of equal logits the lowest token id; `NO_TOKEN` where not all of a row are finite."""
    block_best: Tensor | None = None
    """[rows wanted, ceil(vocab / 64)], float32: the largest of each 64 logits in turn, NaN where one is not finite.
    None where the head does not tell; it spares a sampler one reading of the logits."""
    block_mass: Tensor | None = None
    """Of each 64 logits in turn the sum of exp(logit - the largest), float32. Log-probabilities are made of them and
    of `block_best`, beside which they stand. None where no row asks for any."""
    steps: list[list[int]] | None = None
    """`best` of each step, where the batch was for several; all else is None then."""
    sampled: "Sampled | None" = None
    """What was drawn, where the device has drawn in the step itself."""
