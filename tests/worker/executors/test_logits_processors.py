"""Bans, biases and penalties do what their definitions say, in their order, to their own row alone."""

import math
import random

import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from holdfast.worker.draws import DrawParams, LogitsSettings
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_plan import ScheduledSequence, StepPlan, draws_of
from tests.draw_params import changed
from tests.reference.logits_processors import apply_logits_processors
from tests.reference.sampler import draw, keep_min_p

EOS = frozenset({2, 3})
VOCAB = 40


def params(prompt=(1,), outputs=(), bad_words=(), eos=EOS, **settings) -> DrawParams:
    """The draw after `outputs`, as a sequence would ask for it."""
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(**{"seed": 5, "max_tokens": None, **settings}),
        bad_word_token_ids=tuple(bad_words),
    )
    given = request.sampling_params
    return DrawParams(given, len(outputs), LogitsSettings.of(request, eos), tuple(outputs))


def made(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def edited(logits: torch.Tensor, *draws: DrawParams) -> torch.Tensor:
    logits = logits.clone()
    apply_logits_processors(logits, draws)
    return logits


def banned(logits: torch.Tensor) -> list[set[int]]:
    return [set(torch.nonzero(row == -math.inf).flatten().tolist()) for row in logits]


# --- one at a time ---


def test_a_request_without_logits_processors_has_none():
    assert (
        params(temperature=0.3, top_k=4, top_p=0.5, min_p=0.1, stop_token_ids=[7], bad_words=()).logits_settings is None
    )


def test_only_allowed_tokens_are_left_as_they_were():
    logits = made(2)
    result = edited(logits, params(allowed_token_ids=[4, 9, 4]), params(logit_bias={1: 1.0}))
    assert banned(result) == [set(range(VOCAB)) - {4, 9}, set()]
    assert torch.equal(result[0, [4, 9]], logits[0, [4, 9]])


def test_the_last_token_of_a_bad_word_is_banned_after_the_others():
    words = [(7,), (4, 5), (4, 5, 6), (6, 6)]
    outputs = [(), (4,), (4, 5), (5, 4), (6,), (8, 6)]
    result = edited(made(6), *(params(prompt=(4, 5), outputs=output, bad_words=words) for output in outputs))
    assert banned(result) == [{7}, {7, 5}, {7, 6}, {7, 5}, {7, 6}, {7, 6}]


def test_nothing_that_ends_the_output_is_drawn_before_the_minimum_and_all_of_it_from_there_on():
    draws = [params(outputs=[9] * length, min_tokens=3, stop_token_ids=[8], logit_bias={1: 0.5}) for length in range(5)]
    assert banned(edited(made(5), *draws)) == [{2, 3, 8}] * 3 + [set()] * 2


def test_the_prompt_does_not_count_towards_the_minimum():
    assert banned(edited(made(1), params(prompt=[9] * 50, outputs=[9], min_tokens=2))) == [{2, 3}]


def test_the_minimum_covers_the_end_of_sequence_also_where_it_is_ignored():
    assert banned(edited(made(1), params(min_tokens=1, ignore_eos=True))) == [{2, 3}]


def test_a_bias_comes_before_the_penalties():
    """-1 + 3 is positive, so the repetition penalty divides; the other way round it would have multiplied."""
    logits = torch.full((1, VOCAB), -1.0)
    result = edited(logits, params(prompt=[6], logit_bias={6: 3.0}, repetition_penalty=2.0))
    assert result[0, 6] == 1.0


def test_frequency_and_presence_count_the_output_and_not_the_prompt():
    logits = torch.zeros(1, VOCAB)
    result = edited(logits, params(prompt=[9, 9, 7], outputs=[9, 5, 9], frequency_penalty=0.5, presence_penalty=-0.25))
    assert result[0].nonzero().flatten().tolist() == [5, 9]
    assert result[0, [5, 9]].tolist() == [-0.25, -0.75]


def test_bans_that_leave_nothing_give_way_and_allowed_tokens_do_not():
    nothing_left = params(allowed_token_ids=[2, 3], min_tokens=4)
    something_left = params(allowed_token_ids=[2, 3], bad_words=[(2,)])
    result = edited(made(2), nothing_left, something_left)
    assert banned(result) == [set(range(VOCAB)) - {2, 3}, set(range(VOCAB)) - {3}]


def test_token_ids_that_the_model_does_not_have_do_nothing():
    far = VOCAB + 1
    draws = [
        params(eos=frozenset({far}), min_tokens=1, bad_words=[(far,)], logit_bias={far: 9.0}),
        params(prompt=[far], outputs=[far], repetition_penalty=2.0, frequency_penalty=1.0),
        params(allowed_token_ids=[far]),
    ]
    assert torch.equal(edited(made(3), *draws), made(3))


# --- against others ---


def by_brute_force(logits: list[float], draw_params: DrawParams, prompt: list[int]) -> list[float]:
    """In doubles, one token after the other."""
    wanted, outputs = draw_params.logits_settings, list(draw_params.output_token_ids)
    result = []
    for token_id, logit in enumerate(logits):
        spellings = [word for word in wanted.bad_words if word[-1] == token_id]
        is_bad = any([*outputs, token_id][-len(word) :] == list(word) for word in spellings)
        is_early = len(outputs) < wanted.min_tokens and token_id in wanted.end_token_ids
        is_allowed = wanted.allowed_token_ids is None or token_id in wanted.allowed_token_ids
        if is_bad or is_early or not is_allowed:
            result.append(-math.inf)
            continue
        logit += dict(wanted.logit_bias).get(token_id, 0)
        if token_id in prompt or token_id in outputs:
            logit = logit / wanted.repetition_penalty if logit > 0 else logit * wanted.repetition_penalty
        count = outputs.count(token_id)
        result.append(logit - wanted.frequency_penalty * count - wanted.presence_penalty * (count > 0))
    return result


def some_settings(rng: random.Random) -> dict:
    """A few of the logits processors, at random; never one alone by design."""
    tokens = range(VOCAB)
    choices = {
        "allowed_token_ids": rng.sample(tokens, 25),
        "bad_words": [tuple(rng.choices(range(4, 8), k=rng.randint(1, 3))) for _ in range(6)],
        "min_tokens": rng.randint(0, 12),
        "stop_token_ids": rng.sample(tokens, 2),
        "logit_bias": {token_id: rng.uniform(-5, 5) for token_id in rng.sample(tokens, 6)},
        "repetition_penalty": rng.uniform(0.5, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
    }
    return {"logit_bias": {0: 1.0}} | {name: choices[name] for name in rng.sample(sorted(choices), rng.randint(1, 8))}


def some_draws(num_rows: int, seed: int = 0) -> list[tuple[DrawParams, list[int]]]:
    """Draws with logits processors, each with its prompt."""
    rng = random.Random(seed)
    draws = []
    for _ in range(num_rows):
        prompt = rng.choices(range(VOCAB), k=rng.randint(1, 12))
        outputs = rng.choices(range(4, 8) if rng.random() < 0.5 else range(VOCAB), k=rng.randint(0, 10))
        draws.append((params(prompt, outputs, temperature=rng.choice([0.0, 1.0]), **some_settings(rng)), prompt))
    return draws


def test_mixtures_agree_with_doubles_token_by_token():
    logits, draws = made(300), some_draws(300)
    result = edited(logits, *(item for item, _ in draws))
    expected = [by_brute_force(row, *item) for row, item in zip(logits.tolist(), draws, strict=True)]
    torch.testing.assert_close(result.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_the_repetition_penalty_is_hugging_faces():
    prompt, outputs, logits = [5, 6, 6], [9, 10, 9], made(1)
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + outputs]), logits.clone())
    torch.testing.assert_close(edited(logits, params(prompt, outputs, repetition_penalty=1.3)), theirs)


def test_bad_words_are_hugging_faces_where_the_prompt_is_none():
    words, outputs, logits = [(7,), (4, 5), (9, 4, 6), (8, 4, 6)], (9, 4), made(1)
    theirs = NoBadWordsLogitsProcessor([list(word) for word in words])(torch.tensor([outputs]), logits.clone())
    (ours,), (known,) = banned(edited(logits, params(outputs=outputs, bad_words=words))), banned(theirs)
    assert ours == {7, 5, 6}
    assert known <= ours, "5.17 forgets words that share their last token"


@pytest.mark.parametrize("num_outputs", [0, 1, 2, 3])
def test_the_minimum_is_hugging_faces(num_outputs):
    prompt, outputs, logits = [5] * 4, [6] * num_outputs, made(1)
    theirs = MinNewTokensLengthLogitsProcessor(4, 2, sorted(EOS))(torch.tensor([prompt + outputs]), logits.clone())
    ours = edited(logits, params(prompt, outputs, min_tokens=2, logit_bias={0: 0.0}))
    assert banned(ours) == banned(theirs)


def test_min_p_is_hugging_faces_and_keeps_the_best_and_its_ties():
    logits, min_p = made(50), [0.001, 0.05, 0.3, 0.9, 0.5] * 10
    kept = keep_min_p(logits, min_p)
    for row, share in enumerate(min_p):
        assert torch.equal(kept[row : row + 1], MinPLogitsWarper(share)(None, logits[row : row + 1]))
    assert banned(keep_min_p(torch.tensor([[1.0, 2.0, 2.0]]), [1.0])) == [{0}]


# --- through the sampler ---


def test_greedy_rows_feel_logits_processors_too():
    logits = torch.zeros(3, VOCAB)
    logits[:, 2] = 9.0
    greedy = {"temperature": 0.0}
    draws = [params(**greedy), params(min_tokens=1, **greedy), params(logit_bias={30: 50}, **greedy)]
    assert draw(logits, draws) == [2, 0, 30]


def test_min_p_comes_after_the_temperature():
    """A temperature of 4 lifts the second token from a share of 0.02 to 0.37."""
    logits = torch.tensor([[4.0, 0.0, -100.0]])
    warm = [changed(params(temperature=4.0, min_p=0.1), seed=seed) for seed in range(60)]
    cold = [changed(params(min_p=0.1), seed=seed) for seed in range(60)]
    assert set(draw(logits.expand(60, -1), warm)) == {0, 1}
    assert set(draw(logits.expand(60, -1), cold)) == {0}


def test_frequencies_follow_the_distribution_that_logits_processors_and_min_p_leave():
    settings = {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {9: 2.0}}
    given = params([4, 5], [6, 6, 7], min_p=0.02, min_tokens=9, temperature=1.3, **settings)
    logits, num_draws = made(1), 20_000
    scores = torch.tensor(by_brute_force(logits[0].tolist(), given, [4, 5]), dtype=torch.float64) / 1.3
    shares = torch.softmax(scores, 0)
    shares[shares < 0.02 * shares.max()] = 0
    expected = shares / shares.sum() * num_draws
    drawn = draw(logits.expand(num_draws, -1), [changed(given, seed=seed * 7919) for seed in range(num_draws)])
    counts, kept = torch.bincount(torch.tensor(drawn), minlength=VOCAB), expected > 0
    assert 4 < kept.sum() < VOCAB - 4
    assert counts[~kept].sum() == 0
    degrees = int(kept.sum()) - 1
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum().item()
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_a_row_feels_only_its_own_logits_processors():
    """Rows with and without logits processors, greedy and not, in a batch, alone, in another order: the same tokens."""
    logits, draws = made(60), [item for item, _ in some_draws(40, seed=1)]
    draws += [changed(item, logits_settings=None, output_token_ids=(), min_p=0.2) for item in draws[:20]]
    random.Random(0).shuffle(draws)
    before, together = logits.clone(), draw(logits, draws)
    assert together == [draw(logits[row : row + 1], [draws[row]])[0] for row in range(60)]
    order = list(reversed(range(60)))
    assert draw(logits[order], [draws[row] for row in order]) == [together[row] for row in order]
    assert torch.equal(logits, before)


def test_drafted_tokens_are_outputs_to_the_draws_after_them():
    """Three draws at once are the three draws that a sequence makes one after the other, if the drafts are right."""
    settings = {"frequency_penalty": 1.0, "bad_words": [(8, 9, 4)], "min_tokens": 4}
    first = params([1, 2], [7, 8], **settings)
    sequence = ScheduledSequence(
        sequence_id=0, first_position=3, token_ids=(8, 9, 8), block_ids=(0,), draw=first, num_draws=3
    )
    draws = draws_of(StepPlan(step_id=1, others=(sequence,)))
    assert draws == [first, params([1, 2], [7, 8, 9], **settings), params([1, 2], [7, 8, 9, 8], **settings)]
