"""Pending tokens of a plan: tokens that the step before samples, and that were unknown when the plan was made."""

from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from holdfast.worker.step_plan import DEAD_END, NO_TOKEN, PENDING, DecodeRows, ScheduledSequence, StepPlan, StepResult

KNOWN: Final = -1
"""Value in place of a row, for a token that is known."""

_ANY_TOKEN: Final = 0
"""After a row without a token: its sequence is dropped, and its results are ignored."""


def has_pending(plan: StepPlan) -> bool:
    """Whether a plan has a token that is not known."""
    return PENDING in plan.decodes.token_ids or any(PENDING in share.token_ids for share in plan.others)


def drawing_rows(plan: StepPlan, before: StepPlan) -> "array[int]":
    """Row among the draws of `before` that draws each token of `plan`, in its order, or `KNOWN`."""
    rows = plan.decodes
    is_same = rows.columns is before.decodes.columns  # the same sequences, one step later
    row_of = {} if is_same and not plan.others else _drawing_row_by_sequence(before)
    origins = range(len(rows)) if is_same else [row_of.get(owner, KNOWN) for owner in rows.columns.sequence_ids]
    pairs = zip(origins, rows.token_ids, strict=True)
    found = array("q", [origin if token == PENDING else KNOWN for origin, token in pairs])
    for share in plan.others:
        found.extend([row_of[share.sequence_id] if token == PENDING else KNOWN for token in share.token_ids])
    return found


def with_tokens(plan: StepPlan, before: StepPlan | None, result: StepResult | None) -> StepPlan:
    """A plan with its pending tokens put in: `result` is that of the plan `before`, which ran just before it."""
    if not has_pending(plan):
        return plan
    assert before is not None, "a pending token is drawn by the step before"
    assert result is not None, "which has run"
    pairs = zip(before.sequences, result.token_ids, strict=True)
    token_of = {share.sequence_id: _usable(drawn[-1]) for share, drawn in pairs if drawn}
    rows = plan.decodes
    ids = zip(rows.columns.sequence_ids, rows.token_ids, strict=True)
    known = [token_of[owner] if token == PENDING else token for owner, token in ids]
    decodes = DecodeRows(rows.columns, rows.age, known, rows.blocks)
    others = [_known_share(share, token_of) for share in plan.others]
    return replace(plan, decodes=decodes, others=others)


def _drawing_row_by_sequence(plan: StepPlan) -> dict[int, int]:
    """The last row that each sequence draws from."""
    row_of = {sequence_id: row for row, sequence_id in enumerate(plan.decodes.columns.sequence_ids)}
    row = len(plan.decodes)
    for share in plan.others:
        row += share.num_draws
        if share.num_draws:
            row_of[share.sequence_id] = row - 1
    return row_of


def _known_share(share: ScheduledSequence, token_of: Mapping[int, int]) -> ScheduledSequence:
    if PENDING not in share.token_ids:
        return share
    assert share.token_ids == (PENDING,), "only the last token of a sequence can be pending, and then it decodes"
    return replace(share, token_ids=(token_of[share.sequence_id],))


def _usable(token_id: int) -> int:
    return _ANY_TOKEN if token_id in (NO_TOKEN, DEAD_END) else token_id
