"""Draws against float64 brute force, exact distributions, and themselves in other company."""

import math
import random

import numpy as np
import pytest
import torch

from worker.plan import DrawParams, ScheduledSequence, StepPlan
from worker.sampler import _row_key, draw, draws_of, gumbel_noise, keep_top_k, keep_top_p


def params(seed=0, position=0, temperature=1.0, top_k=0, top_p=1.0) -> DrawParams:
    return DrawParams(seed=seed, first_output_index=position, temperature=temperature, top_k=top_k, top_p=top_p)


def random_params(rng: random.Random) -> DrawParams:
    return params(
        seed=rng.getrandbits(63),
        position=rng.randrange(5000),
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5]),
        top_k=rng.choice([0, 1, 5, 40]),
        top_p=rng.choice([1.0, 0.9, 0.3]),
    )


def probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """By the definitions, one token at a time."""
    scaled = logits.astype(np.float64) / temperature
    if top_k:
        scaled[scaled < np.sort(scaled)[-top_k]] = -np.inf
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if top_p < 1:
        kept, mass = set(), 0.0
        for token in sorted(range(len(probs)), key=lambda i: (-probs[i], -i)):
            if mass >= top_p:
                break
            kept.add(token)
            mass += probs[token]
        probs = np.array([p if i in kept else 0.0 for i, p in enumerate(probs)])
        probs /= probs.sum()
    return probs


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.6},
    ],
    ids=str,
)
def test_draws_over_many_seeds_have_the_exact_distribution(settings):
    num_draws, vocab = 20_000, 16
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = probabilities(logits.numpy(), **{"top_k": 0, "top_p": 1.0, **settings}) * num_draws
    tokens = draw(logits.expand(num_draws, vocab), [params(seed=seed, **settings) for seed in range(num_draws)])
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[expected == 0].any()
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom), f"chi-square {statistic:.1f} with {freedom} degrees"


def test_positions_and_streams_are_independent_of_each_other():
    vocab, num_draws = 8, 20_000
    logits = torch.zeros(num_draws, vocab)
    first = np.array(draw(logits, [params(seed=seed, position=0) for seed in range(num_draws)]))
    second = np.array(draw(logits, [params(seed=seed, position=1) for seed in range(num_draws)]))
    pairs = np.bincount(first * vocab + second, minlength=vocab * vocab)
    expected = num_draws / vocab**2
    freedom = vocab**2 - 1
    assert ((pairs - expected) ** 2 / expected).sum() < freedom + 4 * math.sqrt(2 * freedom)
    keys = {_row_key(seed, position, stream) for seed in range(50) for position in range(50) for stream in range(4)}
    assert len(keys) == 10_000


@pytest.mark.parametrize("vocab", [126, 1000, 1024])
def test_a_row_gets_the_same_token_alone_and_in_any_company(vocab):
    rng = random.Random(vocab)
    draws = [random_params(rng) for _ in range(33)]
    logits = torch.randn(33, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    together = draw(logits, draws)
    assert together == [draw(logits[i : i + 1], [draws[i]])[0] for i in range(33)]
    order = rng.sample(range(33), 33)
    assert draw(logits[order], [draws[i] for i in order]) == [together[i] for i in order]


def test_greedy_takes_the_best_and_the_lowest_id_among_equals():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert draw(logits, [params(temperature=0.0), params(temperature=1e-6)]) == [1, 0]


def test_top_k_keeps_ties_and_top_p_keeps_the_best():
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0]], dtype=torch.float64)
    assert keep_top_k(scores, torch.tensor([1.0])).isfinite().tolist() == [[False, True, True, False]]
    assert keep_top_k(scores, torch.tensor([100.0])).isfinite().all()
    assert keep_top_p(scores, torch.tensor([1e-9], dtype=torch.float64)).isfinite().sum() == 1


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_is_the_smallest_set_with_enough_mass(top_p):
    scores = torch.randn(20, 50, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    kept = keep_top_p(scores, torch.full((20,), top_p, dtype=torch.float64)).isfinite().numpy()
    for row, row_kept in zip(scores.numpy(), kept, strict=True):
        assert set(np.flatnonzero(row_kept)) == set(np.flatnonzero(probabilities(row, 1.0, 0, top_p)))


def test_the_noise_is_what_it_has_always_been():
    """Known answers: a change of the hash would change every seeded completion in the world."""
    noise = gumbel_noise([_row_key(1234567890123456789, 42, 0)], 3)
    assert noise.tolist()[0] == pytest.approx(KNOWN_NOISE, abs=1e-12)


def test_each_row_of_a_plan_has_its_own_output_index():
    drafted = ScheduledSequence(
        sequence_id=0, first_position=7, token_ids=(1, 2, 3), block_ids=(0,), draw=params(position=5), num_draws=3
    )
    prefill = ScheduledSequence(sequence_id=1, first_position=0, token_ids=(1, 2), block_ids=(1,), draw=None)
    decode = ScheduledSequence(
        sequence_id=2, first_position=4, token_ids=(9,), block_ids=(2,), draw=params(position=1), num_draws=1
    )
    plan = StepPlan(step_id=1, sequences=(drafted, prefill, decode))
    assert [draw.first_output_index for draw in draws_of(plan)] == [5, 6, 7, 1]


KNOWN_NOISE = [1.5436516590793687, 0.8067731461922554, 1.5266648092697097]
