"""Step sampler: all that a step reads off its logits, as one interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from holdfast.worker.draws import DrawParams
from holdfast.worker.request import TokenLogprob
from holdfast.worker.step_plan import PromptLogprobParams


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


class Sampled(NamedTuple):
    """What was read off the logits of one step."""

    token_ids: list[int]
    """One for each draw; `NO_TOKEN` where the row has a NaN, or its best logit is infinite."""
    logprobs: list[TokenLogprob | None]
    """One for each draw, None where it asks for none. Empty where none asks."""
    prompt_logprobs: list[TokenLogprob]
    """One for each prompt token that is asked for."""


class StepSampler(Protocol):
    """Draws tokens and reports log-probabilities."""

    @property
    def numerics(self) -> str:
        """Names the arithmetic: samplers of different numerics may draw different tokens from equal logits."""
        ...

    def sample(
        self,
        output: HeadOutput,
        draws: Sequence[DrawParams],
        masks: Mapping[int, bytes] | None = None,
        prompts: Sequence[PromptLogprobParams] = (),
    ) -> Sampled:
        """Reads the logits of `output`, which has some, and does not change them: a row for each draw, and after these
        one for each prompt token of `prompts`. `masks` are those of draws with a grammar, by row.
        """
        ...

    def close(self) -> None:
        """Frees threads and memory. Safe to call twice."""
        ...


@runtime_checkable
class OverlappingSampler(Protocol):
    """A step sampler of a device that runs by itself."""

    def launch(
        self,
        logits: Tensor,
        draws: Sequence[DrawParams],
        masks: Mapping[int, bytes] | None = None,
        prompts: Sequence[PromptLogprobParams] = (),
    ) -> Any:
        """Starts what `StepSampler.sample` does, and waits for nothing."""
        ...

    def collect(self, drawing: Any) -> Sampled:
        """What the oldest draws that were launched and not collected come to. Waits for no step after them."""
        ...
