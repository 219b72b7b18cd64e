"""Launched steps and their results: the sampled tokens and log-probabilities of each sequence, from the output of the
step's wanted rows."""

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from holdfast.worker.executors.step_sampler import ChosenLogprobs, HeadOutput, Sampled, StepSampler
from holdfast.worker.grammar_matchers import NONE_FITS
from holdfast.worker.request import TokenLogprob
from holdfast.worker.step_plan import DEAD_END, PromptLogprobParams, StepPlan, StepResult, draws_of

Item = TypeVar("Item")


class LaunchedStep(NamedTuple):
    """A step that the device has been given."""

    plan: StepPlan
    launched: Any
    """The backend's own."""
    drawing: Any
    """The sampler's own; None where the step draws by itself."""
    dead_ends: frozenset[int] = frozenset()
    """Logits rows whose grammars leave no token."""
    chosen: ChosenLogprobs | None = None
    """Log-probabilities of tokens requested by id, while they are computed."""


def step_result(
    plan: StepPlan, output: HeadOutput, sampler: StepSampler, masks: Mapping[int, bytes] | None = None
) -> StepResult:
    """Result of a step from its `output` for the wanted rows. `masks` are those of rows that have a grammar.

    Rows with NaN or infinity give `NO_TOKEN`, and those whose grammar has a dead end `DEAD_END`; the other rows are not
    affected.
    """
    if output.steps is not None:
        return StepResult(step_id=plan.step_id, token_ids=tuple(zip(*output.steps, strict=True)))
    if output.sampled is not None:
        return StepResult(step_id=plan.step_id, token_ids=_by_sequence(plan, output.sampled.token_ids))
    if output.logits is None:
        assert output.best is not None, "a head gives logits or their argmax"
        return StepResult(step_id=plan.step_id, token_ids=_by_sequence(plan, output.best))
    draws = draws_of(plan)
    chosen = ChosenLogprobs.of(output.logits, draws)
    sampled = sampler.sample(output, draws, fitting(masks), prompts_of(plan))
    return sampled_result(plan, sampled, dead_ends(masks), chosen)


def sampled_result(
    plan: StepPlan, sampled: Sampled, dead: Collection[int] = (), chosen: ChosenLogprobs | None = None
) -> StepResult:
    """Result of a step from what was sampled, sequence by sequence. No token of a `dead` row counts."""
    if chosen is not None and sampled.logprobs:
        sampled = sampled._replace(logprobs=chosen.put_into(sampled.logprobs))
    token_ids = sampled.token_ids
    if dead:
        token_ids = [DEAD_END if row in dead else token_id for row, token_id in enumerate(token_ids)]
    return StepResult(
        step_id=plan.step_id,
        token_ids=_by_sequence(plan, token_ids),
        logprobs=_without_none(_by_sequence(plan, sampled.logprobs)) if sampled.logprobs else (),
        prompt_logprobs=_prompt_logprobs(plan, sampled.prompt_logprobs) if sampled.prompt_logprobs else (),
    )


def fitting(masks: Mapping[int, bytes] | None) -> Mapping[int, bytes] | None:
    """The masks that leave a row a token, for a sampler."""
    return masks and {row: mask for row, mask in masks.items() if mask}


def dead_ends(masks: Mapping[int, bytes] | None) -> frozenset[int]:
    """The rows that no mask leaves a token."""
    return frozenset(row for row, mask in (masks or {}).items() if mask == NONE_FITS)


def prompts_of(plan: StepPlan) -> list[PromptLogprobParams]:
    """Prompt tokens whose log-probabilities a step reports."""
    return [sequence.prompt_logprobs for sequence in plan.others if sequence.prompt_logprobs is not None]


def _by_sequence(plan: StepPlan, drawn: Sequence[Item]) -> tuple[tuple[Item, ...], ...]:
    """Items of the rows of `draws_of` a plan, grouped by sequence."""
    end = len(plan.decodes.token_ids)
    found: list[tuple[Item, ...]] = list(zip(drawn[:end]))
    for share in plan.others:
        start, end = end, end + (share.num_draws if share.draw is not None else 0)
        found.append(tuple(drawn[start:end]))
    return tuple(found)


def _without_none(
    reported: tuple[tuple[TokenLogprob | None, ...], ...],
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Reported items of each sequence, without those of draws that report nothing."""
    return tuple(tuple(item for item in items if item is not None) for items in reported)


def _prompt_logprobs(plan: StepPlan, told_of_all: list[TokenLogprob]) -> tuple[tuple[TokenLogprob, ...], ...]:
    """The prompt logprobs of each sequence of a plan."""
    logprobs = iter(told_of_all)
    counts = (len(sequence.prompt_logprobs.token_ids) if sequence.prompt_logprobs else 0 for sequence in plan.sequences)
    return tuple(tuple(islice(logprobs, count)) for count in counts)
