"""The model of a step's time: it finds the machine's costs, is not fooled by pauses, and never says nonsense."""

import random
from dataclasses import asdict

import pytest

from holdfast.worker.scheduler.step_time import StepCosts, StepSample, StepShape, StepTimeModel

MACHINE = StepCosts(base_s=4e-3, decode_s=5e-4, token_s=8e-5, context_token_s=3e-8)


def shape(num_decodes=0, num_prefill=0, context=200, position=0) -> StepShape:
    attended = num_prefill * position + num_prefill * (num_prefill + 1) // 2
    return StepShape(
        num_decodes=num_decodes,
        num_tokens=num_decodes + num_prefill,
        num_context_tokens=num_decodes * context + attended,
    )


def sample(of: StepShape, step_s: float) -> StepSample:
    return StepSample(
        num_seqs=of.num_decodes + 1,
        num_decodes=of.num_decodes,
        num_tokens=of.num_tokens,
        num_context_tokens=of.num_context_tokens,
        step_s=step_s,
    )


def mixed_shapes(rng: random.Random, count: int) -> list[StepShape]:
    return [
        shape(rng.randrange(32), rng.choice([0, 0, 30, 128, 512]), rng.randrange(50, 800), rng.randrange(1000))
        for _ in range(count)
    ]


def fitted(seed: int, *, noise=0.0, pauses=0.0, num_samples=600, machine=MACHINE) -> StepTimeModel:
    rng, model = random.Random(seed), StepTimeModel()
    for step in mixed_shapes(rng, num_samples):
        pause_s = 1.0 if rng.random() < pauses else 0.0
        model.observe(sample(step, machine.predict(step) * max(0.3, rng.gauss(1, noise)) + pause_s))
    return model


def worst_error(model: StepTimeModel, machine=MACHINE) -> float:
    steps = [shape(8), shape(32, context=700), shape(0, 512), shape(16, 128, 300, 500), shape(1)]
    return max(abs(model.predict(step) / machine.predict(step) - 1) for step in steps)


def test_it_finds_the_costs_of_a_machine_without_noise():
    assert worst_error(fitted(0, num_samples=400)) < 0.02


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_pauses_do_not_fool_it(seed):
    assert worst_error(fitted(seed, noise=0.1, pauses=0.02)) < 0.1


def test_it_follows_a_machine_that_becomes_slower():
    model, slow = fitted(1, noise=0.05), StepCosts(base_s=8e-3, decode_s=1e-3, token_s=1.6e-4, context_token_s=6e-8)
    rng = random.Random(2)
    for step in mixed_shapes(rng, 2500):
        model.observe(sample(step, slow.predict(step) * rng.gauss(1, 0.05)))
    assert worst_error(model, slow) < 0.1


def test_what_prompts_cost_is_not_forgotten_while_there_are_none():
    model, rng = fitted(3), random.Random(3)
    for _ in range(5000):
        model.observe(sample(shape(8), MACHINE.predict(shape(8)) * rng.gauss(1, 0.1)))
    assert worst_error(model) < 0.15


def test_no_cost_is_ever_negative():
    rng, model = random.Random(4), StepTimeModel()
    for step in mixed_shapes(rng, 500):
        model.observe(sample(step, rng.uniform(1e-4, 0.1)))
        assert min(asdict(model.costs).values()) >= 0


def test_before_the_first_sample_more_work_takes_longer():
    model = StepTimeModel()
    assert 0 < model.predict(shape(1)) < model.predict(shape(8)) < model.predict(shape(8, 100))


def test_a_time_of_nothing_teaches_nothing():
    model = StepTimeModel()
    model.observe(sample(shape(4), 0.0))
    assert model.num_samples == 0
    assert model.costs == StepCosts()


@pytest.mark.parametrize(("num_decodes", "position"), [(0, 0), (8, 0), (16, 3000)])
def test_the_prefill_that_fits_is_the_longest_that_does(num_decodes, position):
    decodes = shape(num_decodes)
    count = MACHINE.prefill_tokens_within(0.05, decodes, first_position=position, most=10**6)
    assert MACHINE.predict(shape(num_decodes, count, position=position)) <= 0.05
    assert MACHINE.predict(shape(num_decodes, count + 1, position=position)) > 0.05


def test_what_fits_has_bounds():
    assert MACHINE.prefill_tokens_within(0.001, shape(), most=512) == 0
    assert MACHINE.prefill_tokens_within(10.0, shape(), most=512) == 512
    free = StepCosts(base_s=0.0, decode_s=0.0, token_s=0.0, context_token_s=0.0)
    assert free.prefill_tokens_within(0.05, shape(), most=512) == 512
    assert free.decodes_within(0.05, context_tokens=100, most=64) == 64
    assert MACHINE.decodes_within(0.001, context_tokens=100, most=64) == 0
    flat = StepCosts(base_s=0.1, decode_s=0.0, token_s=0.0, context_token_s=0.0)
    assert (
        flat.prefill_tokens_within(0.05, shape(4), most=512) == flat.decodes_within(0.05, context_tokens=1, most=9) == 0
    )


@pytest.mark.parametrize("tokens_each", [1, 4])
def test_the_decodes_that_fit_are_the_most_that_do(tokens_each):
    count = MACHINE.decodes_within(0.03, context_tokens=400, tokens_each=tokens_each, most=1000)

    def time_of(number: int) -> float:
        tokens = number * tokens_each
        return MACHINE.predict(StepShape(num_decodes=number, num_tokens=tokens, num_context_tokens=tokens * 400))

    assert time_of(count) <= 0.03 < time_of(count + 1)
