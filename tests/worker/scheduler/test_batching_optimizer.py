"""Self-tuning on a simulated machine: it reaches the target, rests on a steady load, and says why."""

import statistics
from dataclasses import asdict

import pytest

from holdfast.worker.scheduler.batching import StepLimits
from holdfast.worker.scheduler.batching_optimizer import WINDOW, BatchingOptimizer, Recommendation, StepReport
from holdfast.worker.scheduler.step_time import StepCosts, StepSample, StepShape, StepTimeModel
from tests.worker.simulated import MACHINE, SimulatedMachine

CROWD = {"rate": 1.0, "prompt_len": 100, "max_tokens": 200}
"""More requests than places."""
PROMPTS = {"rate": 0.1, "prompt_len": 1000, "max_tokens": 50}
"""Few decodes, which long prompts hold up."""
CALM = {"rate": 0.02, "prompt_len": 100, "max_tokens": 100}
NOISY = {"noise": 0.2, "pauses": 0.01}


def only(recommendations: list[Recommendation]) -> Recommendation:
    assert len(recommendations) == 1
    return recommendations[0]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(CROWD, id="crowd", marks=pytest.mark.slow),
        pytest.param(PROMPTS, id="prompts"),
        pytest.param(CALM, id="calm"),
    ],
)
def test_on_a_steady_load_settings_settle_and_stay(load, seed):
    machine = SimulatedMachine(seed, auto_tune=True, **NOISY)
    machine.run(3500, **load)
    num_before = len(machine.changes)
    assert num_before <= 2
    machine.run(2000, **load)
    assert len(machine.changes) == num_before


@pytest.mark.parametrize(("load", "setting"), [(CROWD, "max_num_seqs"), (PROMPTS, "max_num_batched_tokens")])
def test_steps_come_down_to_the_default_target(load, setting):
    machine = SimulatedMachine(1, auto_tune=True, **NOISY)
    machine.run(3000, **load)
    assert statistics.quantiles(machine.step_s[-1000:], n=4)[2] < 1.1 * 0.050
    found = only(machine.tuner.get_recommendations())
    assert found.setting == setting
    assert getattr(machine.scheduler.policy.limits, setting) == found.recommended < found.current


def test_without_auto_tune_it_advises_and_changes_nothing():
    machine = SimulatedMachine(1, **NOISY)
    configured = machine.scheduler.policy.limits
    machine.run(1500, **CROWD)
    assert machine.scheduler.policy.limits is configured
    found = only(machine.tuner.get_recommendations())
    fits = MACHINE.decodes_within(0.8 * 0.050, context_tokens=200, most=64)
    assert (found.setting, found.current) == ("max_num_seqs", 64)
    assert fits / 1.3 < found.recommended < fits * 1.3
    assert "target of 50 ms" in found.reason
    assert "auto-tune" not in found.reason


def test_it_adapts_when_the_machine_becomes_slower_and_when_it_recovers():
    machine = SimulatedMachine(2, auto_tune=True, noise=0.1)
    machine.run(1500, **CROWD)
    before = machine.scheduler.policy.limits.max_num_seqs
    machine.costs = StepCosts(**{name: 2 * cost for name, cost in asdict(MACHINE).items()})
    machine.run(3000, **CROWD)
    slow = machine.scheduler.policy.limits.max_num_seqs
    assert slow < before / 1.5
    machine.costs = MACHINE
    machine.run(4000, **CROWD)
    assert machine.scheduler.policy.limits.max_num_seqs > 1.5 * slow


def test_what_is_set_stays_within_what_is_configured_and_advice_may_go_beyond():
    fast = StepCosts(base_s=1e-3, decode_s=1e-5, token_s=1e-5, context_token_s=1e-9)
    machine = SimulatedMachine(3, costs=fast, auto_tune=True, max_num_seqs=8)
    machine.run(1500, **CROWD)
    found = only(machine.tuner.get_recommendations())
    assert (found.setting, found.current, found.recommended) == ("max_num_seqs", 8, 32)
    assert "requests of" in found.reason
    assert "keeps to the configured value" in found.reason
    assert machine.scheduler.policy.limits.max_num_seqs == 8


def test_a_target_that_not_even_one_sequence_meets_makes_nobody_wait():
    slow = StepCosts(base_s=0.2, decode_s=0.01, token_s=0.01, context_token_s=0.0)
    machine = SimulatedMachine(4, costs=slow, auto_tune=True)
    machine.run(1000, **CROWD)
    assert machine.changes == []


def test_a_step_keeps_a_token_for_every_sequence():
    slow = StepCosts(base_s=0.01, decode_s=0.0, token_s=0.001, context_token_s=0.0)
    machine = SimulatedMachine(4, costs=slow, auto_tune=True, max_num_seqs=100)
    machine.run(2500, **PROMPTS)
    assert machine.scheduler.policy.limits.max_num_batched_tokens == 100


def test_a_setting_that_is_in_nobodys_way_is_left_alone():
    machine = SimulatedMachine(5, auto_tune=True, **NOISY)
    machine.run(3000, **CALM)
    assert machine.changes == []


# --- drafts ---


def drafting(accepted: int, *, num_seqs: int, token_s: float, num_windows=10, **options) -> BatchingOptimizer:
    """Of `num_seqs` sequences that draft 4 tokens each, all have `accepted` of them accepted."""
    model = StepTimeModel(StepCosts(base_s=4e-3, decode_s=1e-4, token_s=token_s, context_token_s=0.0))
    limits = StepLimits(max_num_batched_tokens=512, max_num_seqs=64)
    optimizer = BatchingOptimizer(limits, model, target_tpot_s=1.0, num_speculative_tokens=4, **options)
    num_tokens = 5 * num_seqs
    shape = StepShape(num_decodes=num_seqs, num_tokens=num_tokens, num_context_tokens=100 * num_tokens)
    sample = StepSample(
        num_seqs=num_seqs,
        num_decodes=num_seqs,
        num_tokens=num_tokens,
        num_context_tokens=shape.num_context_tokens,
        step_s=model.predict(shape),
    )
    report = StepReport(
        sample=sample,
        num_decode_tokens=num_tokens,
        num_decode_context_tokens=sample.num_context_tokens,
        num_accepted_drafts=accepted * num_seqs,
        num_waiting=0,
    )
    for _ in range(num_windows * WINDOW):
        optimizer.observe(report)
    return optimizer


def test_drafts_that_are_rarely_right_become_fewer():
    optimizer = drafting(accepted=0, num_seqs=32, token_s=1e-4, auto_tune=True)
    found = only(optimizer.get_recommendations())
    assert (found.setting, found.current, found.recommended) == ("num_speculative_tokens", 4, 1)
    assert "0.0 of 4.0 drafted tokens are accepted" in found.reason
    assert optimizer.limits.num_speculative_tokens == 1


def test_drafts_that_are_always_right_and_cost_little_could_be_more():
    optimizer = drafting(accepted=4, num_seqs=1, token_s=1e-6, auto_tune=True)
    assert only(optimizer.get_recommendations()).recommended == 16
    assert optimizer.limits.num_speculative_tokens == 4


def test_drafts_that_pay_as_they_are_stay():
    optimizer = drafting(accepted=2, num_seqs=4, token_s=1e-4)
    assert optimizer.get_recommendations() == []
