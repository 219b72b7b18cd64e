"""A step sampler of PyTorch's operations: the oracle of the native sampler and of that of GPUs."""

from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.worker.draws import DrawParams
from holdfast.worker.executors.step_sampler import HeadOutput, Sampled
from holdfast.worker.step_plan import NO_TOKEN, PromptLogprobParams
from tests.reference.logprobs import token_logprobs, token_logprobs_of_prompts
from tests.reference.sampler import broken_rows, draw, with_zeros


class TorchSampler:
    """A step sampler of PyTorch's operations, on the device of the logits."""

    numerics: Final = "torch-draws-2"

    def sample(
        self,
        output: HeadOutput,
        draws: Sequence[DrawParams],
        masks: Mapping[int, bytes] | None = None,
        prompts: Sequence[PromptLogprobParams] = (),
    ) -> Sampled:
        logits = output.logits
        assert logits is not None, "a step that is drawn from asks for logits"
        drawn_from, prompt_logits = logits[: len(draws)], logits[len(draws) :]
        if broken := broken_rows(drawn_from):
            drawn_from = with_zeros(drawn_from, broken)
        token_ids = draw(drawn_from, draws, masks)
        logprobs = token_logprobs(drawn_from, draws, token_ids)
        for row in broken:
            token_ids[row] = NO_TOKEN
        return Sampled(token_ids, logprobs, token_logprobs_of_prompts(prompt_logits, prompts) if prompts else [])

    def close(self) -> None:
        pass
