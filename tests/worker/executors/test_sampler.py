"""Draws follow the distribution that the filters leave, and depend on nothing but their own row, seed and position."""

import math

import pytest
import torch
from torch import Tensor

from holdfast.worker.draws import DrawParams
from holdfast.worker.step_plan import ScheduledSequence, StepPlan, draws_of
from tests.draw_params import changed, draw_params
from tests.reference.sampler import draw, keep_top_k, keep_top_p, noise, noise_key

PLAIN = draw_params(seed=7, first_output_index=0, temperature=1.0, top_k=0, top_p=1.0)


def made(num_rows: int, vocab_size: int, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale


def kept(filtered: Tensor) -> list[set[int]]:
    return [set(torch.nonzero(row > -math.inf).flatten().tolist()) for row in filtered]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_best_and_the_lowest_id_of_equals(dtype):
    logits = torch.zeros(3, 1000, dtype=dtype)
    logits[0, [17, 400, 999]] = 5
    logits[1, 999] = 1
    assert draw(logits, [changed(PLAIN, temperature=0.0)] * 3) == [17, 999, 0]


def test_top_k_keeps_the_k_best_and_ties_with_the_last():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 9.0]])
    assert kept(keep_top_k(logits, [2, 3, 1])) == [{1, 2, 3}, {0, 1, 2}, {4}]


@pytest.mark.in_turn
@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("vocab_size", [5, 100, 3000])
def test_top_p_keeps_the_smallest_set_with_enough_mass(vocab_size, scale):
    """Flat rows keep thousands of tokens, peaked ones a few: every stage of the search is reached."""
    logits = made(6, vocab_size, scale)
    top_p = [0.01, 0.1, 0.5, 0.9, 0.999, 0.3]
    assert kept(keep_top_p(logits, top_p)) == [_nucleus(row, p) for row, p in zip(logits.tolist(), top_p, strict=True)]


def test_top_p_always_keeps_the_best_and_ties_with_the_last():
    logits = torch.tensor([[0.0, 4.0, 0.0], [2.0, 2.0, -30.0]])
    assert kept(keep_top_p(logits, [1e-9, 0.4])) == [{1}, {0, 1}]


def test_top_p_counts_only_what_top_k_left():
    """Of four equal tokens top-k leaves two by their logits, so half the mass is one token and its tie."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    drawn = {draw(logits, [changed(PLAIN, seed=seed, top_k=2, top_p=0.7)])[0] for seed in range(50)}
    assert drawn == {0}


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (PLAIN, range(8)),
        (changed(PLAIN, temperature=2.5), range(8)),
        (changed(PLAIN, top_k=3), [0, 1, 2]),
        (changed(PLAIN, top_p=0.8, temperature=1.5), None),
    ],
)
def test_frequencies_follow_the_filtered_distribution(params, allowed):
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, -1.0, 0.5, -2.0])
    scaled = logits.double() / params.sampling.temperature
    allowed = sorted(allowed if allowed is not None else _nucleus(scaled.tolist(), params.sampling.top_p))
    expected = torch.softmax(scaled[allowed], 0)
    num_draws = 20_000
    drawn = draw(logits.expand(num_draws, -1), [changed(params, seed=seed * 7919) for seed in range(num_draws)])
    counts = torch.bincount(torch.tensor(drawn), minlength=8)
    assert counts.sum() == counts[allowed].sum() == num_draws
    chi_square = ((counts[allowed] - expected * num_draws) ** 2 / (expected * num_draws)).sum().item()
    degrees = len(allowed) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_positions_of_one_seed_are_independent_draws():
    """Two draws in a row by one seed: all 16 pairs of four equal tokens come up equally often."""
    num_seeds = 8_000
    logits = torch.zeros(num_seeds, 4)
    first = draw(logits, [changed(PLAIN, seed=seed) for seed in range(num_seeds)])
    second = draw(logits, [changed(PLAIN, seed=seed, first_output_index=1) for seed in range(num_seeds)])
    counts = torch.bincount(torch.tensor(first) * 4 + torch.tensor(second), minlength=16)
    expected = num_seeds / 16
    assert ((counts - expected) ** 2 / expected).sum().item() < 15 + 4 * math.sqrt(30)


def mixed_params(num_rows: int) -> list[DrawParams]:
    return [
        draw_params(
            seed=row * 12345,
            first_output_index=row % 5,
            temperature=[0.0, 0.7, 1.0, 1.3][row % 4],
            top_k=[0, 5, 40][row % 3],
            top_p=[1.0, 0.9, 0.2, 1.0, 0.97][row % 5],
        )
        for row in range(num_rows)
    ]


@pytest.mark.parametrize("vocab_size", [50, 1003, 5000])
def test_a_row_draws_the_same_alone_in_a_batch_and_in_another_order(vocab_size):
    logits, params = made(33, vocab_size), mixed_params(33)
    together = draw(logits, params)
    assert together == [draw(logits[row : row + 1], [params[row]])[0] for row in range(33)]
    order = torch.randperm(33, generator=torch.Generator().manual_seed(0)).tolist()
    assert draw(logits[order], [params[row] for row in order]) == [together[row] for row in order]


def test_another_seed_or_position_draws_other_tokens():
    logits = torch.zeros(1, 100_000)
    tokens = [draw(logits, [changed(PLAIN, seed=seed)])[0] for seed in (1, 2, 2**32 + 1, 2**62 + 1)]
    tokens += [draw(logits, [changed(PLAIN, seed=1, first_output_index=index)])[0] for index in (1, 2)]
    assert len(set(tokens)) == len(tokens)


def test_the_logits_are_left_as_they_were():
    logits = made(4, 100)
    before = logits.clone()
    draw(logits, mixed_params(4))
    assert torch.equal(logits, before)


def test_the_hash_has_known_answers():
    """The finalizer's own known value, and ours, which must never change: a stream is resumed by other versions."""
    assert int(noise(torch.tensor([1]), torch.tensor([0]))) == 0x514E28B7
    assert noise_key(0, 0, 0) == 0
    known = [noise_key(1, 0, 0), noise_key(2**63 - 1, 4095, 0), noise_key(42, 7, 1)]
    assert known == KNOWN_KEYS
    assert noise(torch.tensor(known), torch.tensor([0, 1, 151_935])).tolist() == KNOWN_NOISE


KNOWN_KEYS = [804215951, 85369194, 2256989714]
KNOWN_NOISE = [1461123477, 2316595928, 3077682474]


def test_a_plan_is_expanded_to_one_draw_for_each_logits_row():
    def scheduled(draw: DrawParams | None, num_draws: int) -> ScheduledSequence:
        return ScheduledSequence(
            sequence_id=0, first_position=0, token_ids=(1,) * 4, block_ids=(0,), draw=draw, num_draws=num_draws
        )

    sequences = (scheduled(PLAIN, 1), scheduled(None, 0), scheduled(changed(PLAIN, first_output_index=10), 3))
    draws = draws_of(StepPlan(step_id=0, others=sequences))
    assert [params.first_output_index for params in draws] == [0, 10, 11, 12]


def _nucleus(logits: list[float], top_p: float) -> set[int]:
    """By definition, one token after the other, in exactly rounded sums."""
    weights = [math.exp(logit - max(logits)) for logit in logits]
    total = math.fsum(weights)
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    staying: list[int] = []
    while not staying or math.fsum(weights[token] for token in staying) / total < top_p:
        staying.append(order[len(staying)])
    return {token for token in order if weights[token] >= weights[staying[-1]]}
