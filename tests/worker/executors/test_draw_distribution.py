"""Over thousands of seeds the first two tokens come up as often as exact probabilities say, with drafts and without.

The model is a table: a row of logits for the prompt, and one for each token that may come first. The probabilities are
worked out in plain Python floats, from the definitions alone.
"""

import math
from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.sequence import Sequence
from holdfast.worker.step_plan import ScheduledSequence, StepPlan, draws_of
from tests.reference.sampler import draw

FEW_SEEDS, NUM_SEEDS = 4_000, 20_000
PROMPT = (2, 5)
VOCAB = 8
PROMPT_ROW = VOCAB
TABLE = (torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5).tolist()
DRAFT_TABLE = torch.tensor(TABLE) + torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(4)) * 0.7

SETTINGS = {
    "temperature": {"temperature": 1.7},
    "cold": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "repetition": {"repetition_penalty": 2.5},
    "presence and frequency": {"presence_penalty": 1.2, "frequency_penalty": 0.8},
    "all": {
        "temperature": 1.3,
        "top_k": 6,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.4,
        "presence_penalty": -0.7,
        "frequency_penalty": 0.5,
        "logit_bias": {1: 0.8},
    },
}


# --- the reference ---


def probabilities(logits: list[float], params: SamplingParams, outputs: tuple[int, ...]) -> list[float]:
    """How likely each token is to be drawn next, by the definitions."""
    values = [logit + params.logit_bias.get(token, 0.0) for token, logit in enumerate(logits)]
    counts = Counter(outputs)
    for token in range(VOCAB):
        if token in PROMPT or counts[token]:
            penalty = params.repetition_penalty
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        values[token] -= params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
    weights = [math.exp(value / params.temperature) for value in values]
    weights = [weight if weight >= params.min_p * max(weights) else 0.0 for weight in weights]
    if params.top_k:
        weights = [weight if weight >= sorted(weights)[-params.top_k] else 0.0 for weight in weights]
    mass = [weight / sum(weights) for weight in weights]
    better = [sum(other for other in mass if other > own) for own in mass]
    staying = [own if above < params.top_p else 0.0 for own, above in zip(mass, better, strict=True)]
    return [own / sum(staying) for own in staying]


def expected_counts(params: SamplingParams, num_seeds: int) -> dict[tuple[int, int], float]:
    first = probabilities(TABLE[PROMPT_ROW], params, ())
    second = [probabilities(TABLE[token], params, (token,)) for token in range(VOCAB)]
    return {(a, b): num_seeds * first[a] * second[a][b] for a, b in product(range(VOCAB), repeat=2)}


# --- the same through sequences and the sampler ---


def sequences(params: dict[str, object], num_seeds: int) -> list[Sequence]:
    def make(seed: int) -> Sequence:
        request = EngineRequest(
            request_id=str(seed),
            prompt_token_ids=PROMPT,
            sampling_params=SamplingParams(max_tokens=2, seed=seed * 7919, **params),
        )
        return Sequence(seed, request, max_model_len=64, eos_token_ids=frozenset())

    return [make(seed) for seed in range(num_seeds)]


def rows_after(contexts: list[int], table: Tensor) -> Tensor:
    return table[torch.tensor(contexts)]


def step(batch: list[Sequence], drafts: list[int] | None = None) -> None:
    """One step of the model for everyone in the batch, each with a draft after its last token or none."""
    shares = []
    for index, sequence in enumerate(batch):
        draft = () if drafts is None else (drafts[index],)
        shares.append(
            ScheduledSequence(
                sequence_id=sequence.sequence_id,
                first_position=len(sequence.token_ids) - 1,
                token_ids=(sequence.token_ids[-1], *draft),
                block_ids=(0,),
                draw=sequence.draw_params(),
                num_draws=1 + len(draft),
            )
        )
    contexts = [
        row
        for sequence, share in zip(batch, shares, strict=True)
        for row in (sequence.token_ids[-1] if sequence.num_output_tokens else PROMPT_ROW, *share.token_ids[1:])
    ]
    drawn = iter(draw(rows_after(contexts, torch.tensor(TABLE)), draws_of(StepPlan(step_id=1, others=tuple(shares)))))
    for sequence, share in zip(batch, shares, strict=True):
        sequence.advance(share, tuple(next(drawn) for _ in range(share.num_draws)))


def play(params: dict[str, object], num_seeds: int, *, speculate: bool) -> tuple[list[tuple[int, ...]], int]:
    """The first two tokens of every seed, and how many drafts were right."""
    batch = sequences(params, num_seeds)
    drafts = None
    if speculate:
        drafts = draw(rows_after([PROMPT_ROW] * num_seeds, DRAFT_TABLE), [one.draw_params() for one in batch])
    step(batch, drafts)
    num_right = sum(one.num_output_tokens == 2 for one in batch)
    step([one for one in batch if one.num_output_tokens < 2])
    return [tuple(one.token_ids[len(PROMPT) :]) for one in batch], num_right


def chi_square_limit(degrees: int) -> float:
    """What a true distribution exceeds once in 1,000 times (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize(
    ("name", "num_seeds"),
    [
        pytest.param(name, number, marks=[] if (name, number) == ("all", FEW_SEEDS) else pytest.mark.slow)
        for name in SETTINGS
        for number in (FEW_SEEDS, NUM_SEEDS)
    ],
)
def test_two_tokens_follow_the_exact_distribution_with_and_without_drafts(name, num_seeds):
    params = SETTINGS[name]
    drawn, _ = play(params, num_seeds, speculate=False)
    assert_distributed(drawn, expected_counts(SamplingParams(**params), num_seeds))
    drafted, num_right = play(params, num_seeds, speculate=True)
    assert 0.3 * num_seeds < num_right < num_seeds, "the drafts were meant to be good, and not perfect"
    assert drafted == drawn


def assert_distributed(drawn: list[tuple[int, ...]], expected: dict[tuple[int, int], float]) -> None:
    counts = Counter(drawn)
    possible = {pair for pair, count in expected.items() if count > 0}
    assert counts.keys() <= possible, f"drawn, though they are impossible: {counts.keys() - possible}"
    common = [pair for pair in possible if expected[pair] >= 5]
    rare = len(drawn) - sum(expected[pair] for pair in common)
    statistic = sum((counts[pair] - expected[pair]) ** 2 / expected[pair] for pair in common)
    if rare >= 5:
        statistic += (len(drawn) - sum(counts[pair] for pair in common) - rare) ** 2 / rare
    assert statistic < chi_square_limit(len(common) - (rare < 5)), f"{statistic = }"


def test_a_wrong_distribution_is_told_from_a_right_one():
    """The check itself can fail: a tenth of one pair's mass moved to another is seen."""
    params = SamplingParams(**SETTINGS["cold"])
    drawn, _ = play(SETTINGS["cold"], NUM_SEEDS, speculate=False)
    expected = expected_counts(params, NUM_SEEDS)
    (most, second), (other, third) = sorted(expected, key=expected.get)[-2:][::-1]
    moved = {**expected, (most, second): expected[most, second] * 0.9}
    moved[other, third] += expected[most, second] * 0.1
    with pytest.raises(AssertionError, match="statistic"):
        assert_distributed(drawn, moved)
