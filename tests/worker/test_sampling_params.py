"""Sampling parameters are checked by their declarations: wrong ones are refused by name, whoever filled them in."""

import math
from dataclasses import fields, replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import Parameter
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.value_types import RequestOutputKind

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHOLE = ("top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "n", "best_of", "beam_width")
FLAGS = (*("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo", "detokenize", "truncate_right"),)
WRONG = {name: ("hot", True, [1.0], math.nan) for name in (*NUMBERS, "length_penalty")}
WRONG |= {name: ("1", 1.5, True, [1]) for name in (*WHOLE, "truncate_prompt_tokens")}
WRONG |= dict.fromkeys(FLAGS, ("yes", 1, None))
WRONG |= {name: (5, [1], [None]) for name in ("stop", "bad_words")}
WRONG |= {
    name: (5, "12", ["1"], [1.5], [True]) for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
}
WRONG |= {"logit_bias": (5, [1], {"1": 1.0}, {1: "a"}, {1: None}), "structured_outputs": (5, "json", ["json"])}


def test_every_parameter_has_its_wrong_types_here():
    assert WRONG.keys() == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_a_wrong_type_is_refused_by_name(name):
    for value in WRONG[name]:
        with pytest.raises(InvalidRequestError) as refused:
            SamplingParams(**{name: value})
        assert refused.value.field == f"sampling_params.{name}", value


@pytest.mark.parametrize("name", ["temperature", "top_k", "max_tokens", "n"])
def test_numbers_of_numpy_are_numbers(name):
    whole = SamplingParams(**{name: numpy.int64(1)})
    assert getattr(whole, name) == 1


@pytest.mark.parametrize(
    ("seed", "taken"), [(0, 0), (2**63 - 1, 2**63 - 1), (-1, None), (-2, 2**63 - 2), (-(2**63), 0)]
)
def test_seeds_are_those_of_64_bits_and_minus_one_is_none_as_in_vllm(seed: int, taken: int | None):
    params = SamplingParams(seed=5)
    params.seed = seed
    assert (params.seed, SamplingParams(seed=seed).seed) == (taken, taken)
    for wrong in (2**63, -(2**63) - 1):
        with pytest.raises(InvalidRequestError, match="9223372036854775807"):
            SamplingParams(seed=wrong)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_tokens", "n", "length_penalty"])
def test_none_is_no_value_of_a_parameter_that_always_has_one(name):
    with pytest.raises(InvalidRequestError, match=f"sampling_params.{name} = None"):
        SamplingParams(**{name: None})


def test_lists_of_any_sort_are_stored_as_tuples():
    params = SamplingParams(stop="a", bad_words=["b"], stop_token_ids={3}, allowed_token_ids=numpy.arange(2).tolist())
    assert (params.stop, params.bad_words) == (("a",), ("b",))
    assert (params.stop_token_ids, params.allowed_token_ids) == ((3,), (0, 1))
    nothing = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None)
    assert nothing == SamplingParams()


# --- changes ---


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(-1, 3),
        "seed": st.none() | st.integers(-1, 3),
        "max_tokens": st.none() | st.integers(0, 3),
        "min_tokens": st.integers(0, 3),
        "n": st.integers(0, 3),
        "best_of": st.none() | st.integers(0, 3),
        "beam_width": st.none() | st.integers(1, 3),
        "stop": st.sampled_from(["a", (), [""]]),
    },
)


@given(CHANGES, CHANGES)
def test_changed_parameters_are_what_they_would_be_if_built_anew(first, changes):
    def outcome(build):
        try:
            return build()
        except InvalidRequestError as error:
            return str(error)

    try:
        params = SamplingParams(**first)
    except InvalidRequestError:
        return
    assert outcome(lambda: params.with_changes(**changes)) == outcome(lambda: replace(params, **changes))


def test_what_stays_is_not_checked_again(monkeypatch):
    params = SamplingParams(allowed_token_ids=[1, 2], stop="a")
    checked = []
    check = Parameter.check
    monkeypatch.setattr(Parameter, "check", lambda self, value: checked.append(self.name) or check(self, value))
    changed = params.with_changes(seed=3)
    assert checked == ["seed"]
    assert changed == SamplingParams(allowed_token_ids=[1, 2], stop="a", seed=3)


def test_a_change_of_nothing_that_there_is_is_our_own_mistake():
    with pytest.raises(TypeError, match="heat"):
        SamplingParams().with_changes(heat=1)


# --- parameters that are set ---


def test_a_parameter_that_is_set_is_checked_and_a_refused_value_changes_nothing():
    params = SamplingParams(max_tokens=8)
    params.temperature, params.stop = 0.25, "end"
    assert (params.temperature, params.stop) == (0.25, ("end",))
    for name, value in (("temperature", -1), ("min_tokens", 9), ("detokenize", False)):
        before = params.clone()
        with pytest.raises(InvalidRequestError):
            setattr(params, name, value)
        assert params == before
    with pytest.raises(AttributeError):
        params.temprature = 1.0


def test_a_clone_is_equal_and_another_object():
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.0}, stop=["a"])
    twin = params.clone()
    assert twin == params
    twin.temperature = 1.0
    assert params.temperature == 0.5


def test_parameters_of_optional_values_are_those_of_vllm():
    none = dict.fromkeys(("n", "temperature", "top_p", "presence_penalty", "repetition_penalty", "stop", "logprobs"))
    assert SamplingParams.from_optional(**none) == SamplingParams.from_optional() == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    made = SamplingParams.from_optional(logit_bias={"7": 150, 8: -1e9, "9": 0.5}, seed=3, watermarking=None)
    assert made == SamplingParams(logit_bias={7: 100.0, 8: -100.0, 9: 0.5}, seed=3)
    with pytest.raises(InvalidRequestError, match=r"sampling_params\.logit_bias.*must have token ids.*not 'a', None"):
        SamplingParams.from_optional(logit_bias={"a": 1, "7": 1, None: 1})
    with pytest.raises(InvalidRequestError, match="watermarking"):
        SamplingParams.from_optional(watermarking=True)
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams.from_optional(tempreature=1)


def test_names_of_vllm_are_understood():
    guided = SamplingParams(guided_decoding={"choice": ["a", "b"]}, output_kind=RequestOutputKind.DELTA)
    assert guided == SamplingParams(structured_outputs={"choice": ["a", "b"]})
    guided.output_kind = RequestOutputKind.FINAL_ONLY
    with pytest.raises(InvalidRequestError, match="output_kind"):
        guided.output_kind = "delta"
    with pytest.raises(InvalidRequestError, match="guided_decoding"):
        SamplingParams(guided_decoding={"regex": "a"}, structured_outputs={"regex": "b"})


def test_the_first_tokens_of_an_output_are_drawn_as_in_the_whole():
    """What reports something, or asks for more tokens than that, is left out."""
    params = SamplingParams(
        temperature=0.5, seed=3, min_tokens=8, max_tokens=20, logprobs=2, logprob_token_ids=(5,), prompt_logprobs=1
    )
    first = params.first_tokens(4)
    assert first == SamplingParams(temperature=0.5, seed=3, min_tokens=4, max_tokens=4)
    assert params.first_tokens(10).min_tokens == 8


def test_parameters_are_fitted_to_a_model():
    fitted = SamplingParams(max_tokens=2**40, top_k=2**40, min_tokens=7).fitted(5, max_model_len=100, vocab_size=64)
    assert (fitted.seed, fitted.max_tokens, fitted.top_k, fitted.min_tokens) == (5, 100, 64, 7)
    with pytest.raises(InvalidRequestError, match=r"sampling_params.min_tokens.*at most 6, the model's maximum"):
        fitted.fitted(5, max_model_len=6, vocab_size=64)
