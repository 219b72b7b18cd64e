"""The pseudo-model's draws: as the real logits processors and logprobs, and as the oracle by the request alone."""

import random
import re

import pytest
import torch

from holdfast.cluster.simulate.oracle.oracle import _may_follow, expected_completion, right_logprob, right_token
from holdfast.cluster.simulate.oracle.pseudo_model import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    PseudoCodec,
    PseudoMatcher,
    allows,
    drawn_token,
    likelihoods,
    scores,
    token_logprob,
)
from holdfast.cluster.simulate.world.traffic import draw_requests
from holdfast.worker.draws import DrawParams, LogitsSettings
from holdfast.worker.request import EngineRequest, FinishReason
from holdfast.worker.sampling_params import SamplingParams
from tests.reference.logits_processors import apply_logits_processors
from tests.reference.logprobs import token_logprobs

EOS = frozenset({EOS_TOKEN_ID})
PROMPT = (3, 7, 7, 12)


def request(grammar: str = "", bad_words: tuple[tuple[int, ...], ...] = (), **settings) -> EngineRequest:
    params = SamplingParams(**{"seed": 5, "max_tokens": 40, **settings})
    return EngineRequest(
        request_id="r",
        prompt_token_ids=PROMPT,
        sampling_params=params,
        grammar=grammar,
        bad_word_token_ids=bad_words,
    )


def draw_of(item: EngineRequest, output: bytes) -> DrawParams:
    params = item.sampling_params
    return DrawParams(params, len(output), LogitsSettings.of(item, EOS), tuple(output))


def drawn_requests(number: int) -> list[EngineRequest]:
    """Those of a simulation."""
    return [planned.request for planned in draw_requests(random.Random(number), 150, 1.0, 48) if not planned.is_poison]


def test_simulations_have_requests_of_every_kind():
    requests = [item for number in range(4) for item in drawn_requests(number)]
    params = [item.sampling_params for item in requests]
    kinds = {
        "grammar": [bool(item.grammar) for item in requests],
        "bad words": [bool(item.bad_word_token_ids) for item in requests],
        "grammar and penalty": [bool(item.grammar) and item.sampling_params.frequency_penalty for item in requests],
        "no noise": [one.temperature == 0 for one in params],
        "repetition": [one.repetition_penalty != 1 for one in params],
        "bias": [bool(one.logit_bias) for one in params],
        "allowed": [one.allowed_token_ids is not None for one in params],
        "logprobs": [one.logprobs is not None for one in params],
        "prompt logprobs": [one.prompt_logprobs is not None for one in params],
        "logprobs of several": [one.logprobs is not None and one.n > 1 for one in params],
        "none of it": [LogitsSettings.of(item, EOS) is None for item in requests],
    }
    assert [name for name, found in kinds.items() if not any(found)] == []


def test_draws_are_those_of_the_real_logits_processors_and_of_the_oracle():
    num_controlled = 0
    for item in drawn_requests(1):
        if LogitsSettings.of(item, EOS) is None:
            continue
        output = b""
        for _ in range(6):
            params = draw_of(item, output)
            prefix = bytes(item.prompt_token_ids) + output
            matcher = PseudoMatcher(item.grammar) if item.grammar else None
            mask = matcher.compute_bitmask() if matcher is not None and matcher.consume_tokens(output) else None
            raw = scores(prefix, params.seed, len(output)) if params.sampling.temperature else likelihoods(prefix)
            logits = torch.tensor([[score / 16 - 8 for score in raw]])
            apply_logits_processors(logits, [params], {0: mask} if mask else {})
            token_id = drawn_token(prefix, params, mask)
            assert token_id == int(logits.argmax()) == right_token(item, output), item
            if item.grammar and token_id == EOS_TOKEN_ID:
                break
            output += bytes((token_id,))
            num_controlled += 1
    assert num_controlled > 200


def test_logprobs_rank_as_the_real_ones_do():
    for number in range(50):
        tokens = bytes(random.Random(number).choices(range(VOCAB_SIZE), k=8))
        params = draw_of(request(logprobs=5), b"")
        (real,) = token_logprobs(torch.tensor([list(likelihoods(tokens[:7]))]).float(), [params], [tokens[7]])
        said = token_logprob(tokens[:7], tokens[7], 5)
        assert said == right_logprob(tokens, 7, 5)
        assert (said.rank, [token_id for token_id, _ in said.top]) == (
            real.rank,
            [token_id for token_id, _ in real.top],
        )


@pytest.mark.parametrize("grammar", ["ab:cde:2", "ab:cdefgh:3", "gh:a:1"])
def test_the_matcher_and_the_oracle_read_grammars_alike(grammar):
    rng = random.Random(3)
    for _ in range(40):
        matcher, output = PseudoMatcher(grammar), b""
        while (allowed := sorted(_may_follow(grammar, output))) != [EOS_TOKEN_ID] and len(output) < 30:
            mask = matcher.compute_bitmask()
            assert [token_id for token_id in range(VOCAB_SIZE) if allows(mask, token_id)] == allowed, output
            output += bytes((rng.choice([token_id for token_id in allowed if token_id != EOS_TOKEN_ID]),))
            assert matcher.consume_token(output[-1])


def test_a_matcher_takes_tokens_back_and_stands_still_after_an_error():
    matcher = PseudoMatcher("ab:cde:2")
    a, b, c = (PseudoCodec().token_id(letter) for letter in "abc")
    before = matcher.compute_bitmask()
    assert matcher.validate_tokens([a, c, a, b]) == 3
    assert matcher.compute_bitmask() == before
    assert matcher.consume_tokens([a, c])
    assert matcher.rollback(2)
    assert matcher.compute_bitmask() == before
    assert not matcher.consume_tokens([a, b])
    assert matcher.is_error()
    assert [token_id for token_id in range(VOCAB_SIZE) if allows(matcher.compute_bitmask(), token_id)] == [EOS_TOKEN_ID]


def test_an_output_with_a_grammar_ends_where_the_grammar_does():
    item, entry = request("ab:cde:1", max_tokens=None, ignore_eos=True), "[cde]"
    for _ in range(40):
        entry = f"(?:[cde]|a{entry}b)"
    right = expected_completion(item, 4000)
    assert re.fullmatch(f"a{entry}b", right.text)
    assert (right.finish_reason, right.token_ids[-1]) == (FinishReason.STOP, EOS_TOKEN_ID)


def test_without_noise_the_likeliest_token_is_drawn():
    right = expected_completion(request(temperature=0.0, logprobs=0, ignore_eos=True), 60)
    assert {said.rank for said in right.logprobs} == {1}


def test_bans_and_penalties_change_what_comes():
    plain = expected_completion(request(), 60).token_ids
    banned = expected_completion(request(bad_words=tuple((token_id,) for token_id in set(plain))), 60).token_ids
    assert not set(plain) & set(banned)
    penalized = expected_completion(request(frequency_penalty=2.0, presence_penalty=2.0), 60).token_ids
    assert penalized != plain
    assert expected_completion(request(allowed_token_ids=[4]), 60).token_ids == (4,) * 40
