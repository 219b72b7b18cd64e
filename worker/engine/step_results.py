"""Step results: what a step's output for its rows wanted comes to, sequence by sequence.

What may not live here: how logits become tokens (`worker/sampling/`), and how a step is run (`model_runner.py`).
"""

from collections.abc import Mapping
from itertools import islice

from holdfast.worker.plan.draws import by_sequence, draws_of
from holdfast.worker.plan.step_plan import PromptLogprobParams, StepPlan, StepResult
from holdfast.worker.request import TokenLogprob
from holdfast.worker.sampling.head_output import HeadOutput
from holdfast.worker.sampling.step_sampler import Sampled, StepSampler


def step_result(
    plan: StepPlan, output: HeadOutput, sampler: StepSampler, masks: Mapping[int, bytes] | None = None
) -> StepResult:
    """What a step's `output` for its rows wanted comes to. `masks` are those of rows that have a grammar.

    Rows with NaN or infinity give `NO_TOKEN`; the other rows are not affected.
    """
    if output.steps is not None:
        return StepResult(step_id=plan.step_id, token_ids=tuple(zip(*output.steps, strict=True)))
    if output.sampled is not None:
        return StepResult(step_id=plan.step_id, token_ids=by_sequence(plan, output.sampled.token_ids))
    if output.logits is None:
        assert output.best is not None, "a head gives logits or their argmax"
        return StepResult(step_id=plan.step_id, token_ids=by_sequence(plan, output.best))
    return sampled_result(plan, sampler.sample(output, draws_of(plan), masks, prompts_of(plan)))


def sampled_result(plan: StepPlan, sampled: Sampled) -> StepResult:
    """What was read off the logits of a step, sequence by sequence."""
    return StepResult(
        step_id=plan.step_id,
        token_ids=by_sequence(plan, sampled.token_ids),
        logprobs=by_sequence(plan, sampled.logprobs) if sampled.logprobs else (),
        prompt_logprobs=_prompt_logprobs(plan, sampled.prompt_logprobs) if sampled.prompt_logprobs else (),
    )


def prompts_of(plan: StepPlan) -> list[PromptLogprobParams]:
    """The prompt tokens whose log-probabilities a step tells."""
    return [sequence.prompt_logprobs for sequence in plan.others if sequence.prompt_logprobs is not None]


def _prompt_logprobs(plan: StepPlan, told_of_all: list[TokenLogprob]) -> tuple[tuple[TokenLogprob, ...], ...]:
    """The prompt logprobs of each sequence of a plan."""
    told = iter(told_of_all)
    counts = (len(sequence.prompt_logprobs.token_ids) if sequence.prompt_logprobs else 0 for sequence in plan.sequences)
    return tuple(tuple(islice(told, count)) for count in counts)
