"""With two plans in flight every request gets the tokens that it gets with one, whatever happens in between.

The machine of `scheduler_machine.py`, with steps that are planned before the step before them is committed.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from holdfast.worker.pending_tokens import has_pending, with_tokens
from holdfast.worker.scheduler import planned_step
from holdfast.worker.scheduler import prompt_outputs as prompt_logprobs
from holdfast.worker.scheduler.batching import MemoryAwareBatching
from holdfast.worker.step_plan import PENDING, ScheduledSequence, StepPlan, StepResult
from tests.worker.scheduler.scheduler_machine import MAX_PROMPT_LOGPROBS, MAX_STEPS, SchedulerMachine
from tests.worker.schedulers import dropped

VARIETY = {1: {"logit_bias": {5: 1.0}}, 2: {"presence_penalty": 0.5}}
"""By seed. The pseudo-model's tokens do not depend on it, but it decides who may be planned ahead."""


class AheadMachine(SchedulerMachine):
    def __init__(self):
        super().__init__()
        self.flight: list[StepPlan] = []
        self.landed: tuple[StepPlan | None, StepResult | None] = (None, None)
        self.num_ahead = 0

    @rule(
        data=st.data(),
        num_steps=st.integers(1, 8),
        step_s=st.sampled_from([0.0, 0.1, 1.0]),
        abort=st.sampled_from([*["nobody"] * 6, "one", "one ahead", "one ahead", "all", "all ahead"]),
        go_ahead=st.sampled_from([True, True, True, False]),
    )
    def run(self, data, num_steps, step_s, abort, go_ahead):
        for _ in range(num_steps):
            self.now += step_s
            if not self.turn(data, abort, go_ahead):
                return

    def turn(self, data, abort="nobody", go_ahead=True) -> bool:
        if not self.flight:
            plan = self.plan()
            if plan is None:
                return False
            self.check_plan(plan)
            self.flight.append(plan)
        self.abort(data, abort == "one", abort == "all")
        if go_ahead:
            self.plan_ahead()
        self.abort(data, abort == "one ahead", abort == "all ahead")
        self.land()
        return True

    def abort(self, data, one, everyone):
        if one:
            self.abort_one(data)
        elif everyone:
            self.abort_all()
        self.scheduler.check_integrity()

    def plan_ahead(self) -> None:
        num_preemptions = self.scheduler.stats().num_preemptions
        plan = self.scheduler.plan_ahead(self.now)
        self.note_expired()
        if plan is not None:
            self.flight.append(plan)
            self.num_ahead += 1
            self.check_plan(plan)
        assert self.scheduler.stats().num_preemptions == num_preemptions

    def land(self) -> None:
        plan = self.flight.pop(0)
        result = self.run_checked(with_tokens(plan, *self.landed))
        self.landed = (plan, result)
        self.take(self.scheduler.commit(plan, result))

    def note_expired(self) -> None:
        for request_id in dropped(self.scheduler):
            assert self.expected[request_id].is_alive, "a request ends once"
            self.expected[request_id].has_expired = True

    def run_checked(self, plan: StepPlan) -> StepResult:
        assert not has_pending(plan)
        result = self.runner.run(plan)
        for sequence in plan.sequences:
            expected = self.by_sequence_id[sequence.sequence_id]
            self.check_owned(sequence)
            if expected.is_alive:
                before = (*expected.request.prompt_token_ids, *expected.received)[: sequence.first_position]
                assert self.runner.read_back(sequence) == [*before, *sequence.token_ids]
        return result

    def check_scheduled(self, sequence: ScheduledSequence) -> None:
        self.check_blocks(sequence)
        self.check_hazards(sequence)
        expected = self.by_sequence_id[sequence.sequence_id]
        if PENDING not in sequence.token_ids:
            super().check_scheduled(sequence)
            return
        (before, _) = self.flight
        assert any(share.sequence_id == sequence.sequence_id and share.num_draws == 1 for share in before.sequences)
        num_tokens = len(expected.request.prompt_token_ids) + len(expected.received)
        assert (sequence.token_ids, sequence.first_position) == ((PENDING,), num_tokens)
        assert sequence.draw.first_output_index == len(expected.received) + 1
        assert len(sequence.block_ids) == num_tokens // self.block_size + 1
        params = expected.request.sampling_params
        assert not params.presence_penalty
        assert params.prompt_logprobs is None or expected.received

    def check_owned(self, sequence: ScheduledSequence) -> None:
        """Nobody else can have got the blocks of a step in flight, nor find those that it writes to."""
        allocator = self.scheduler._allocator
        assert all(allocator.ref_count(block_id) > 0 for block_id in sequence.block_ids)
        written = sequence.block_ids[sequence.first_position // self.block_size :]
        assert not any(block_id in allocator.prefix_cache.contents for block_id in written)

    def check_hazards(self, sequence: ScheduledSequence) -> None:
        """It writes to no block that another sequence of a step in flight uses."""
        end = sequence.first_position + len(sequence.token_ids) - 1
        written = set(sequence.block_ids[sequence.first_position // self.block_size : end // self.block_size + 1])
        for plan in self.flight:
            for other in plan.sequences:
                assert other.sequence_id == sequence.sequence_id or not written & set(other.block_ids)

    def check_first_is_served(self, members) -> None:
        if len(self.flight) < 2:
            super().check_first_is_served(members)
        else:  # who awaits a result is left out, first or not; and who came in now may be before all others from now on
            self.note_running()

    def further_params(self, seed):
        return VARIETY.get(seed, {})

    def teardown(self):
        num_steps = 0
        while self.turn(None, go_ahead=num_steps % 5 < 4):
            self.nothing_is_lost()
            num_steps += 1
            assert num_steps < MAX_STEPS, f"still alive: {sorted(self.alive())}"
        super().teardown()


class MemoryAwareAheadMachine(AheadMachine):
    make_policy = MemoryAwareBatching


@pytest.mark.parametrize("max_held_up", [0.125, 1.0])
@pytest.mark.parametrize(
    ("machine", "max_examples"),
    [
        (AheadMachine, 15),
        (MemoryAwareAheadMachine, 6),
        pytest.param(AheadMachine, 300, marks=pytest.mark.slow),
        pytest.param(MemoryAwareAheadMachine, 80, marks=pytest.mark.slow),
    ],
)
def test_every_request_gets_its_own_tokens_with_two_plans_in_flight(machine, max_examples, max_held_up, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "MAX_PROMPT_LOGPROBS", MAX_PROMPT_LOGPROBS)
    monkeypatch.setattr(planned_step, "MAX_SHARE_HELD_UP", max_held_up)
    profile = settings(
        max_examples=max_examples,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(machine, settings=profile)
