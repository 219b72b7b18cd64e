"""Multi-step decoding: how many decode steps a runner is given on one plan.

Where a step takes a millisecond, planning and delivering take a good part of its time. Several steps on one plan share
that; but who arrives meanwhile waits for them, so together they take no longer than a limit. What may not live here:
which sequences can go on without a plan (`worker/scheduling/decode_batch.py`).
"""

from typing import Final, Protocol, runtime_checkable

from holdfast.worker.plan.step_plan import StepPlan, StepRunner

LIMIT_S: Final = 0.006
"""Of all steps of a plan: less than a step with a prompt takes, which who arrives may wait for as well."""


@runtime_checkable
class MultiStepRunner(Protocol):
    """A step runner that may run the decodes of a plan for several steps."""

    @property
    def runs_several_steps(self) -> bool:
        """Whether it does now."""
        ...


class RunLength:
    """The most steps of the next plan, by what the last ones took."""

    def __init__(self, runner: StepRunner, most: int) -> None:
        """At most `most` steps."""
        self.max_steps = 1
        self._runner = runner if most > 1 and isinstance(runner, MultiStepRunner) else None
        self._most = most

    def observe(self, plan: StepPlan, plan_s: float) -> None:
        """Takes in how long a plan's steps took, in seconds. One that does more than decode says nothing of decodes."""
        if self._runner is None:
            return
        if plan.others or plan_s <= 0 or not self._runner.runs_several_steps:
            self.max_steps = 1
        else:
            self.max_steps = max(1, min(self._most, int(LIMIT_S * plan.num_steps / plan_s)))
