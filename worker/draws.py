"""Draws of a step plan: the draw parameters of each logits row, and the tokens that each must not give.

All of it follows from the plan without any logits.
"""

from array import array
from dataclasses import replace

from holdfast.worker.step_plan import DrawParams, StepPlan


def draws_of(plan: StepPlan) -> list[DrawParams]:
    """The draws of a plan, one for each of its logits rows, in order."""
    draws = plan.decodes.draws()
    for sequence in plan.others:
        if sequence.draw is not None and sequence.num_draws > 0:
            draws.append(sequence.draw)
            drafts = sequence.token_ids[len(sequence.token_ids) - sequence.num_draws + 1 :]
            draws += [draw_after(sequence.draw, drafts[: index + 1]) for index in range(len(drafts))]
    return draws


def plain_draws_of(plan: StepPlan) -> list[DrawParams] | None:
    """`draws_of` a plan that decodes, if they only draw: without logits processors and log-probabilities."""
    columns = plan.decodes.columns
    if plan.others and any(sequence.prompt_logprobs is not None for sequence in plan.others):
        return None
    draws = None if columns.ask_for_logprobs else draws_of(plan)
    if draws is None or any(draw.logits_settings is not None or draw.num_logprobs is not None for draw in draws):
        return None
    return draws


def draw_after(first: DrawParams, drafts: tuple[int, ...]) -> DrawParams:
    """The draw after these drafted tokens, which it takes for outputs: it counts only if they are right."""
    looks_back = first.logits_settings is not None and first.logits_settings.look_back
    return replace(
        first,
        first_output_index=first.first_output_index + len(drafts),
        output_token_ids=_with(first.output_token_ids, drafts) if looks_back else (),
    )


def _with(outputs: "tuple[int, ...] | array[int]", drafts: tuple[int, ...]) -> "tuple[int, ...] | array[int]":
    return outputs + drafts if isinstance(outputs, tuple) else outputs + array("q", drafts)


def banned_token_ids(params: DrawParams) -> list[int]:
    """What bad words, the minimum length and ends that are to be ignored forbid as the next token, of a draw with
    logits processors."""
    logits_settings, outputs = params.logits_settings, params.output_token_ids
    assert logits_settings is not None, "only draws with logits processors have bans"
    banned = [
        word[-1] for word in logits_settings.bad_words if tuple(outputs[len(outputs) - len(word) + 1 :]) == word[:-1]
    ]
    if params.first_output_index < logits_settings.min_tokens:
        banned += logits_settings.end_token_ids
    return banned + list(logits_settings.avoided_token_ids)
