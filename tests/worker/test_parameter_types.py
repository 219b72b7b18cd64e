"""Sampling parameters of a wrong type are refused by the field's name, whoever filled them in."""

import math
from dataclasses import fields

import numpy
import pytest

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHOLE = ("top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "n", "best_of", "beam_width")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo")
WRONG = {name: ("hot", True, [1.0], math.nan) for name in (*NUMBERS, "length_penalty")}
WRONG |= {name: ("1", 1.5, True, [1]) for name in (*WHOLE, "truncate_prompt_tokens")}
WRONG |= dict.fromkeys(FLAGS, ("yes", 1, None))
WRONG |= {name: (5, [1], [None]) for name in ("stop", "bad_words")}
WRONG |= {name: (5, "12", ["1"], [1.5], [True]) for name in ("stop_token_ids", "allowed_token_ids")}
WRONG |= {"logit_bias": (5, [1], {"1": 1.0}, {1: "a"}, {1: None}), "structured_outputs": (5, "json", ["json"])}


def test_every_parameter_has_its_wrong_types_here():
    assert WRONG.keys() == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_of_a_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**{name: value})
    assert refused.value.field == f"sampling_params.{name}"


@pytest.mark.parametrize("name", ["temperature", "top_k", "max_tokens", "n"])
def test_numbers_of_numpy_are_numbers(name):
    whole = SamplingParams(**{name: numpy.int64(1)})
    assert getattr(whole, name) == 1


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_tokens", "n", "length_penalty"])
def test_none_is_no_value_of_a_parameter_that_always_has_one(name):
    with pytest.raises(InvalidRequestError, match=f"sampling_params.{name} = None"):
        SamplingParams(**{name: None})
