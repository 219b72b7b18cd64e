"""Settings of simulated replicas: their schedulers, what runs a step, how long a step takes.

What may not live here: their lives (`replica.py`), and drawing settings (`cluster/simulate/world/scenario.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from holdfast.worker.config import SchedulerConfig, SpeculationConfig
from holdfast.worker.plan.step_plan import StepPlan, StepResult
from holdfast.worker.scheduling.scheduler import Scheduler
from holdfast.worker.speculation.speculation import Proposer, Speculation
from holdfast.worker.tuning.step_time import StepCosts


class Runner(Protocol):
    """Runs a plan; virtual time does not pass."""

    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """What every replica of a simulation is like."""

    scheduler: SchedulerConfig
    num_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    prefix_caching: bool
    step_costs: StepCosts
    make_runner: Callable[[int, int], Runner]
    """From the number of blocks and their size."""
    num_drafts: int = 0
    """Tokens guessed ahead for a sequence, at most."""
    make_proposer: Callable[[], Proposer] | None = None
    """Who guesses; None: nobody."""

    def make_scheduler(self) -> Scheduler:
        return Scheduler(
            self.scheduler,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            prefix_caching=self.prefix_caching,
            drafter=self._speculation(),
        )

    def _speculation(self) -> Speculation | None:
        if self.make_proposer is None:
            return None
        config = SpeculationConfig(speculative="ngram", num_speculative_tokens=self.num_drafts)
        return Speculation(config, self.scheduler, self.make_proposer())
