"""The question is the same for ever, and two answers are equal only to the bit."""

import math
from copy import deepcopy

import pytest

from holdfast.worker.replica.known_answer import NUM_OUTPUT_TOKENS, NUM_PROMPT_TOKENS, KnownAnswer, make_question
from holdfast.worker.request import Priority, TokenDelta, TokenLogprob


def rated(token_id: int, logprob: float) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=logprob, rank=2, top=((9, -0.25),))


def an_answer() -> KnownAnswer:
    answer = KnownAnswer()
    first = {"prompt_logprobs": (rated(4, -2.5),), "token_ids": (7,), "logprobs": (rated(7, -1.5),)}
    answer.take(TokenDelta(attempt="q", first_token_index=0, **first))
    answer.take(TokenDelta(attempt="q", first_token_index=1, token_ids=(8,), logprobs=(rated(8, -1.0),)))
    return answer


def test_the_question_does_not_change():
    """Else two replicas of different versions would differ although they compute the same."""
    question = make_question(vocab_size=1000, max_sequence_len=4096)
    assert question.prompt_token_ids[:6] == (58, 411, 955, 330, 435, 237)
    assert (len(question.prompt_token_ids), question.sampling_params.max_tokens) == (80, 8)
    assert question.priority is Priority.LOW
    assert question.tenant, "the share of tenants without a name is not to pay for it"


def test_the_answers_digest_does_not_change():
    assert an_answer().digest.hex() == "f2d32afa"


@pytest.mark.parametrize("room", [1, 5, 9, 40, 87, 88, 1000])
def test_the_question_fits_where_anything_of_its_kind_does(room):
    question = make_question(vocab_size=50, max_sequence_len=room)
    num_prompt_tokens = len(question.prompt_token_ids)
    assert 1 <= num_prompt_tokens <= NUM_PROMPT_TOKENS
    assert num_prompt_tokens + NUM_OUTPUT_TOKENS <= room or num_prompt_tokens == 1
    assert max(question.prompt_token_ids) < 50


def test_what_was_said_in_pieces_is_one_answer():
    answer = an_answer()
    assert answer.token_ids == [7, 8]
    assert [len(answer.prompt_logprobs), len(answer.logprobs)] == [1, 2]
    assert answer.difference(an_answer()) == ""


def test_the_last_bit_of_a_log_probability_is_a_difference():
    wrong = an_answer()
    wrong.logprobs[1] = rated(8, math.nextafter(-1.0, 0.0))
    assert wrong.difference(an_answer()).startswith("log-probability of output token 1: ")
    assert wrong.digest != an_answer().digest


def test_what_is_no_number_is_a_difference():
    wrong = an_answer()
    wrong.prompt_logprobs[0] = rated(4, math.nan)
    assert wrong.difference(an_answer()).startswith("prompt token 0: ")


@pytest.mark.parametrize("part", ["prompt_logprobs", "token_ids", "logprobs"])
def test_what_is_missing_or_too_much_is_a_difference(part):
    short = deepcopy(an_answer())
    getattr(short, part).pop()
    assert short.difference(an_answer()).endswith(f", not {getattr(an_answer(), part)[-1]}")
    assert an_answer().difference(short).endswith(", not None")
    assert short.digest != an_answer().digest
