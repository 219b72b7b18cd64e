"""Steps in flight: they are launched and collected, and the output of their wanted rows becomes the sampled tokens and
log-probabilities of each sequence.

The time of planning and delivery is hidden. Where a step takes a millisecond, planning and delivering take a good part
of its time. On CPUs several steps on one plan share that time; but requests that arrive meanwhile wait for them, so
together they take no longer than a limit. A device that runs by itself is given the next step while it runs the first.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

from holdfast.worker.executors.step_sampler import ChosenLogprobs, HeadOutput, Sampled, StepSampler
from holdfast.worker.grammar_matchers import NONE_FITS
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.request import TokenLogprob
from holdfast.worker.step_plan import DEAD_END, PromptLogprobParams, StepPlan, StepResult, StepRunner, draws_of

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

    Rows with NaN or infinity give `NO_TOKEN`, and rows whose grammar has a dead end `DEAD_END`; other rows are not
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
    """Result of a step from its sampled tokens, sequence by sequence. No token of a `dead` row counts."""
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


PLAN_LIMIT_S: Final = 0.006
"""All steps of a plan together: less than a step with a prompt takes, which a request that arrives may wait for too."""


class OverlappingRunner(ABC):
    """A `StepRunner` that runs one step while the next is planned and launched. Steps run in the order of their
    launches; a launched step is collected, unless the engine ends.
    """

    @abstractmethod
    def launch(self, plan: StepPlan) -> None:
        """Starts a step, and does not wait for it. `PENDING` tokens in it are sampled by the step launched before
        it.
        """

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
    """The maximum number of steps of the next plan, by the time of the last ones."""

    def __init__(self, runner: StepRunner, most: int) -> None:
        """Runs at most `most` steps."""
        self.max_steps = 1
        self._runner = runner if most > 1 and isinstance(runner, MultiStepRunner) else None
        self._most = most

    def observe(self, plan: StepPlan, plan_s: float) -> None:
        """Takes in how long a plan's steps took, in seconds. A step with prefill says nothing about decodes."""
        if self._runner is None:
            return
        if plan.others or plan_s <= 0 or not self._runner.runs_several_steps:
            self.max_steps = 1
        else:
            self.max_steps = max(1, min(self._most, int(PLAN_LIMIT_S * plan.num_steps / plan_s)))


class LaunchingRunner(Protocol):
    """A runner whose model can be given a step before the one before it has run."""

    @property
    def overlaps(self) -> bool: ...

    def launch(self, plan: StepPlan, before: StepPlan | None) -> LaunchedStep: ...

    def collect(self, step: LaunchedStep) -> StepResult: ...

    def keep_alive(self) -> None: ...

    def close(self) -> None: ...


class DeviceRunner(OverlappingRunner):
    """Launches the steps of a leader whose model overlaps them."""

    def __init__(self, leader: LaunchingRunner) -> None:
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
