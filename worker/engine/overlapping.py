"""Hides the time of planning and delivery: several decode steps per plan (on CPUs), or a second step in flight.

Where a step takes a millisecond, planning and delivering take a good part of its time. On CPUs several steps on one
plan share that time; but requests that arrive meanwhile wait for them, so together they take no longer than a limit. A
device that runs by itself is given the next step while it runs the first.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, runtime_checkable

from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.engine.step_results import LaunchedStep
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.step_plan import StepPlan, StepResult, StepRunner

PLAN_LIMIT_S: Final = 0.006
"""All steps of a plan together: less than a step with a prompt takes, which a request that arrives may wait for too."""


class OverlappingRunner(ABC):
    """A `StepRunner` that runs one step while the next is planned and launched. Steps run in the order of their
    launches; one that was launched is collected, unless the engine ends.
    """

    @abstractmethod
    def launch(self, plan: StepPlan) -> None:
        """Starts a step, and does not wait for it. What is `PENDING` in it is drawn by the step launched before it."""

    @abstractmethod
    def may_follow(self, plan: StepPlan) -> bool:
        """Whether a step can be launched after this one, which was launched last, before it is collected."""

    @abstractmethod
    def collect(self) -> StepResult:
        """Result of the oldest step in flight. Waits for it. Raises `ReplicaError` if a rank is lost."""

    def run(self, plan: StepPlan) -> StepResult:
        """Both, while nothing is in flight."""
        self.launch(plan)
        return self.collect()

    @abstractmethod
    def keep_alive(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class StepsInFlight:
    """The steps that a runner has been given and that are not collected: none, one, or one and its successor."""

    def __init__(self, runner: StepRunner, progress: ProgressCounter, clock: Callable[[], float]) -> None:
        """A runner that overlaps nothing runs a step when it is collected."""
        self.plans: deque[StepPlan] = deque()
        """Their plans, the oldest first. To be read only."""
        self._runner = runner
        self._overlapping = runner if isinstance(runner, OverlappingRunner) else None
        self.overlaps = self._overlapping is not None
        """Whether the runner may have two of them."""
        self._progress = progress
        self._clock = clock
        self._began_s = 0.0

    def can_go_ahead(self) -> bool:
        """Whether the runner takes the successor of the step in flight now."""
        overlapping = self._overlapping
        return overlapping is not None and len(self.plans) == 1 and overlapping.may_follow(self.plans[0])

    def launch(self, plan: StepPlan) -> None:
        """Gives a plan to the runner, or keeps it for `collect` if the runner overlaps nothing."""
        self.plans.append(plan)
        if len(self.plans) == 1:
            self._begin()
        if self._overlapping is not None:
            self._overlapping.launch(plan)

    def collect(self) -> tuple[StepPlan, StepResult, float]:
        """Waits for the oldest step. Returns it, its result, and the seconds since its launch or since the step before
        it was collected.
        """
        plan = self.plans[0]
        result = self._runner.run(plan) if self._overlapping is None else self._overlapping.collect()
        step_s = self._clock() - self._began_s
        self.plans.popleft()
        self._progress.end_step(plan.num_tokens)
        if self.plans:
            self._begin()
        return plan, result, step_s

    def _begin(self) -> None:
        """Makes it the oldest step, of which progress is expected from now on."""
        self._progress.begin_step(self.plans[0].num_tokens)
        self._began_s = self._clock()


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
        """Runs at most `most` steps."""
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
            self.max_steps = max(1, min(self._most, int(PLAN_LIMIT_S * plan.num_steps / plan_s)))


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
