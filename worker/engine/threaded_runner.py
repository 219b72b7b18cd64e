"""Threaded runner: runs steps on a thread of its own, while the engine's thread plans the next.

It pays where a step leaves the interpreter to others for most of its time, and a core is free for the engine. What may
not live here: what a step does (`model_runner.py`).
"""

import threading
from queue import SimpleQueue
from typing import Final

from holdfast.worker.engine.overlapping import OverlappingRunner
from holdfast.worker.plan.pending_tokens import with_tokens
from holdfast.worker.plan.step_plan import StepPlan, StepResult, StepRunner

CLOSE_LIMIT_S: Final = 5.0
"""How long `close` waits for the step now running. A runner whose peer has died may never come back."""


class ThreadedRunner(OverlappingRunner):
    """Runs the steps of another runner on a thread, from the first launch until `close`."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="steps", daemon=True)

    def launch(self, plan: StepPlan) -> None:
        if not self._thread.ident:
            self._thread.start()
        self._plans.put(plan)

    def may_follow(self, plan: StepPlan) -> bool:
        """Whatever is drawn is there before the next step begins."""
        return True

    def collect(self) -> StepResult:
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def keep_alive(self) -> None:
        self._runner.keep_alive()

    def close(self) -> None:
        """Waits for the step now running, at most for a while."""
        self._plans.put(None)
        if self._thread.ident:
            self._thread.join(CLOSE_LIMIT_S)
        self._runner.close()

    def _work(self) -> None:
        """Ends with the first step that fails: what was launched after it has no tokens to go on from."""
        before: StepPlan | None = None
        result: StepResult | None = None
        while (plan := self._plans.get()) is not None:
            try:
                before, result = plan, self._runner.run(with_tokens(plan, before, result))
            except BaseException as error:  # the engine's thread raises it
                self._results.put(error)
                return
            self._results.put(result)
