"""Device runner: the leader's runner on a device that runs by itself, with two steps in flight.

Tokens that the device draws go from one step to the next without the host. What may not live here: one step's way
through a rank (`model_runner.py`).
"""

from collections import deque

from holdfast.worker.engine.model_runner import LaunchedStep, LeaderRunner
from holdfast.worker.engine.overlapping import OverlappingRunner
from holdfast.worker.plan.step_plan import StepPlan, StepResult


class DeviceRunner(OverlappingRunner):
    """Launches the steps of a leader whose model overlaps them."""

    def __init__(self, leader: LeaderRunner) -> None:
        assert leader.overlaps, "the device runs steps in turn"
        self._leader = leader
        self._in_flight: deque[LaunchedStep] = deque()

    def launch(self, plan: StepPlan) -> None:
        before = self._in_flight[-1].plan if self._in_flight else None
        self._in_flight.append(self._leader.launch(plan, before))

    def may_follow(self, plan: StepPlan) -> bool:
        """All draws are launched with their step."""
        return True

    def collect(self) -> StepResult:
        return self._leader.collect(self._in_flight.popleft())

    def keep_alive(self) -> None:
        self._leader.keep_alive()

    def close(self) -> None:
        self._leader.close()
