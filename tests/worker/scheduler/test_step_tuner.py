"""Chunked prefill under a target: decodes go on in time while long prompts stream in, and the prompts get through."""

from dataclasses import asdict

import pytest

from holdfast.worker.scheduler.step_time import StepCosts
from tests.worker.simulated import BLOCK_SIZE, MACHINE, SimulatedMachine

TARGET_MS = 50


def streaming(target_tpot_ms: float | None, **options) -> SimulatedMachine:
    """8 sequences decode while 6 prompts of 2000 tokens come in; all run to their end."""
    machine = SimulatedMachine(target_tpot_ms=target_tpot_ms, **options)
    for _ in range(8):
        machine.add(prompt_len=100, max_tokens=400)
    for _ in range(60):
        machine.step()
    machine.step_s.clear()
    for _ in range(6):
        machine.add(prompt_len=2000, max_tokens=20)
    while machine.scheduler.has_work:
        machine.step()
        machine.scheduler.check_integrity()
    return machine


@pytest.fixture(scope="module")
def on_target() -> SimulatedMachine:
    return streaming(TARGET_MS, known=True)


def test_decodes_keep_to_the_target_while_prompts_stream_in_and_all_finish(on_target):
    assert max(on_target.step_s) <= TARGET_MS / 1000
    assert on_target.num_finished == 14


def test_without_a_target_the_same_prompts_hold_decodes_up():
    machine = streaming(None, known=True)
    assert max(machine.step_s) > 1.5 * TARGET_MS / 1000
    assert machine.num_finished == 14


def test_the_room_that_the_target_leaves_is_used(on_target):
    assert sorted(on_target.step_s)[-60] > 0.85 * TARGET_MS / 1000


def test_a_machine_that_is_not_known_yet_is_within_a_few_steps():
    machine = streaming(TARGET_MS)
    assert max(machine.step_s) < 1.2 * TARGET_MS / 1000
    assert sum(step_s > TARGET_MS / 1000 for step_s in machine.step_s) <= 20


def test_prompts_get_a_block_at_each_step_even_if_the_decodes_alone_take_too_long():
    slow = StepCosts(base_s=0.1, decode_s=1e-3, token_s=1e-4, context_token_s=0.0)
    machine = SimulatedMachine(costs=slow, target_tpot_ms=TARGET_MS)
    machine.add(prompt_len=16, max_tokens=300)
    for _ in range(30):
        machine.step()
    machine.add(prompt_len=2000, max_tokens=1)
    num_before = machine.num_steps
    while not machine.num_finished:
        machine.step()
    assert machine.num_steps - num_before == 2000 / BLOCK_SIZE


def test_prompts_alone_are_not_held_back():
    machine = SimulatedMachine(target_tpot_ms=1)
    machine.add(prompt_len=2000, max_tokens=1)
    while machine.scheduler.has_work:
        machine.step()
    assert machine.num_steps == -(-2000 // 512)


@pytest.mark.parametrize("auto_tune", [False, True])
def test_the_target_holds_with_noise_for_nearly_all_steps(auto_tune):
    machine = SimulatedMachine(7, noise=0.1, target_tpot_ms=TARGET_MS, auto_tune=auto_tune)
    machine.run(2500, rate=0.1, prompt_len=1000, max_tokens=50)
    late = [step_s > TARGET_MS / 1000 for step_s in machine.step_s[500:]]
    assert sum(late) < 0.05 * len(late)


def test_it_reads_steps_as_what_they_are():
    machine = SimulatedMachine(8, known=True, max_num_batched_tokens=33)
    machine.run(600, rate=0.3, prompt_len=50, max_tokens=20)
    learned, true = asdict(machine.tuner.model.costs), asdict(MACHINE)
    assert learned == pytest.approx(true, rel=1e-6), "samples that fit the truth leave the truth as it is"
