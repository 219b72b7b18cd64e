"""Plans of several steps, run by what runs one: the steps one after the other, each with the tokens of the one before.

For runners that have nothing better, as pseudo-models. What may not live here: when a plan is for several steps
(`worker/scheduling/decode_batch.py`).
"""

from collections.abc import Callable
from dataclasses import replace

from holdfast.worker.plan.decode_rows import DecodeRows
from holdfast.worker.plan.step_plan import StepPlan, StepResult


def run_each(plan: StepPlan, run: Callable[[StepPlan], StepResult]) -> StepResult:
    """What the steps of a plan come to; `run` runs plans of one step."""
    if plan.num_steps == 1:
        return run(plan)
    rows, drawn = plan.decodes, []
    token_ids = list(rows.token_ids)
    for number in range(plan.num_steps):
        single = DecodeRows(rows.columns, rows.age + number, token_ids, rows.blocks)
        copies = () if number else plan.block_copies
        result = run(replace(plan, decodes=single, block_copies=copies))
        token_ids = [token_id for (token_id,) in result.token_ids]
        drawn.append(token_ids)
    return StepResult(step_id=plan.step_id, token_ids=tuple(zip(*drawn, strict=True)))
