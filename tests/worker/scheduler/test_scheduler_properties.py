"""Whatever comes, in whatever order, under whatever memory pressure: the tokens are right and nothing is lost.

The machine of `scheduler_machine.py`, with each batching policy, and with drafts of the scheduler's own.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)

from benchmarks.bucketed_batching import BucketedBatching
from benchmarks.static_batching import StaticBatching
from holdfast.worker.config import SpeculationConfig
from holdfast.worker.scheduler import prompt_outputs as prompt_logprobs
from holdfast.worker.scheduler.batching import MemoryAwareBatching
from holdfast.worker.scheduler.sequence import Sequence
from holdfast.worker.scheduler.speculation import Speculation
from tests.worker.scheduler.scheduler_machine import MAX_PROMPT_LOGPROBS, SchedulerMachine


class MemoryAwareMachine(SchedulerMachine):
    make_policy = MemoryAwareBatching


class MultiStepMachine(SchedulerMachine):
    """Plans are for several steps where they can be. The settings are those of greedy requests; the tokens are not."""

    max_steps = 5

    def further_params(self, seed: int) -> dict[str, object]:
        return {"temperature": 0.0}

    def with_drafts(self, plan, data):
        return plan if plan.num_steps > 1 else super().with_drafts(plan, data)


class StaticMachine(SchedulerMachine):
    make_policy = StaticBatching
    may_cache_prefixes = False


class BucketedMachine(SchedulerMachine):
    make_policy = BucketedBatching
    may_cache_prefixes = False


class SpeculatingMachine(SchedulerMachine):
    """Every other sequence is guessed right, the others right and wrong by turns."""

    def speculation(self) -> Speculation:
        config = SpeculationConfig(speculative="ngram", num_speculative_tokens=6)
        return Speculation(config, self.config, proposer=self)

    def propose(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        expected = self.expected[sequence.request.request_id]
        future = expected.outputs[sequence.num_output_tokens :][:num_tokens]
        turn = sequence.sequence_id % 2 * sequence.num_output_tokens % 5
        return tuple(token_id if turn != place else -1 for place, token_id in enumerate(future, 1))

    def forget(self, sequence: Sequence) -> None:
        pass


@pytest.mark.parametrize(
    ("machine", "max_examples"),
    [
        (SchedulerMachine, 15),
        (SpeculatingMachine, 10),
        (MultiStepMachine, 15),
        (MemoryAwareMachine, 8),
        (StaticMachine, 5),
        (BucketedMachine, 5),
        pytest.param(SchedulerMachine, 200, marks=pytest.mark.slow),
        pytest.param(MultiStepMachine, 100, marks=pytest.mark.slow),
        pytest.param(SpeculatingMachine, 100, marks=pytest.mark.slow),
        pytest.param(MemoryAwareMachine, 60, marks=pytest.mark.slow),
        pytest.param(StaticMachine, 40, marks=pytest.mark.slow),
        pytest.param(BucketedMachine, 40, marks=pytest.mark.slow),
    ],
)
def test_every_request_gets_its_own_tokens_whatever_happens(machine, max_examples, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "MAX_PROMPT_LOGPROBS", MAX_PROMPT_LOGPROBS)
    profile = settings(
        max_examples=max_examples,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(machine, settings=profile)
