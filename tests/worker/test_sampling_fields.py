"""A sampling parameter is the field of its name in every message that has it, and comes back as it was said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.v1 import engine_pb2, inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams
from holdfast.worker.wire.sampling_fields import TOKEN_SCOPE, fields_of, params_of

VALUES = {
    "temperature": st.sampled_from([0.0, 0.7, 1.0, 100.0]),
    "top_k": st.integers(0, 9),
    "top_p": st.sampled_from([0.1, 1.0]),
    "min_p": st.sampled_from([0.0, 0.05, 1.0]),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "repetition_penalty": st.sampled_from([1.0, 1.3]),
    "presence_penalty": st.sampled_from([0.0, -0.2]),
    "frequency_penalty": st.sampled_from([0.0, 2.0]),
    "logit_bias": st.dictionaries(st.integers(0, 9), st.sampled_from([-100.0, 0.1]), max_size=2),
    "allowed_token_ids": st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=2),
    "bad_words": st.lists(st.sampled_from("ab"), max_size=2),
    "structured_outputs": st.none()
    | st.sampled_from([{"regex": "a+"}, {"choice": ["a", "b"]}, {"json_object": True}, {"json": "{}"}]),
    "max_tokens": st.none() | st.integers(9, 20),
    "min_tokens": st.integers(0, 9),
    "stop": st.lists(st.sampled_from("ab"), max_size=2),
    "stop_token_ids": st.lists(st.integers(0, 9), max_size=2),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "n": st.integers(1, 3),
    "best_of": st.none() | st.integers(3, 4),
    "beam_width": st.none(),
    "length_penalty": st.sampled_from([1.0, -0.6]),
    "logprobs": st.none() | st.integers(0, 20),
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "logprob_token_ids": st.lists(st.integers(0, 9), max_size=2),
    "echo": st.booleans(),
    "truncate_prompt_tokens": st.none() | st.sampled_from([-1, 4]),
    "truncate_right": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "detokenize": st.booleans(),
}
GIVEN = st.fixed_dictionaries({}, optional=VALUES)
PARAMS = (
    GIVEN.filter(lambda given: given.get("detokenize", True) or not given.get("stop"))
    .filter(lambda given: given.get("logprobs") is not None or not given.get("logprob_token_ids"))
    .map(lambda given: SamplingParams(**given))
)


def test_every_parameter_is_tried_here():
    assert VALUES.keys() == PARAMETERS.keys()


def test_the_public_message_has_every_parameter_and_no_other():
    fields = set(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert fields - {"no_max_tokens"} == PARAMETERS.keys()


def test_the_link_has_every_parameter_of_the_token_world_and_no_other():
    fields = set(engine_pb2.EngineSamplingParams.DESCRIPTOR.fields_by_name)
    made_by_the_router = {"bad_words", "grammar"}
    concerned = {name for name, parameter in PARAMETERS.items() if parameter.metadata.scope in TOKEN_SCOPE}
    assert fields - made_by_the_router == concerned


@given(PARAMS)
def test_parameters_come_back_from_the_public_message_as_they_were_said(params):
    message = inference_pb2.SamplingParams(**fields_of(params, inference_pb2.SamplingParams))
    assert params_of(inference_pb2.SamplingParams.FromString(message.SerializeToString())) == params


@given(PARAMS)
def test_the_link_carries_what_concerns_the_token_world_bit_by_bit(params):
    resolved = params.with_changes(seed=params.seed or 0, temperature=params.temperature / 3)
    message = engine_pb2.EngineSamplingParams(**fields_of(resolved, engine_pb2.EngineSamplingParams, TOKEN_SCOPE))
    carried = params_of(engine_pb2.EngineSamplingParams.FromString(message.SerializeToString()), TOKEN_SCOPE)
    for name, parameter in PARAMETERS.items():
        concerned = parameter.metadata.scope in TOKEN_SCOPE
        assert getattr(carried, name) == getattr(resolved if concerned else SamplingParams(), name), name


def test_unset_is_the_default_and_zero_is_a_value():
    assert params_of(inference_pb2.SamplingParams()) == SamplingParams()
    said = inference_pb2.SamplingParams(temperature=0, seed=0, logprobs=0, skip_special_tokens=False)
    assert params_of(said) == SamplingParams(temperature=0, seed=0, logprobs=0, skip_special_tokens=False)


def test_a_number_and_its_denial_contradict_each_other():
    assert params_of(inference_pb2.SamplingParams(no_max_tokens=True)).max_tokens is None
    with pytest.raises(
        InvalidRequestError, match=r"sampling_params\.max_tokens = 3: must not be set with no_max_tokens"
    ):
        params_of(inference_pb2.SamplingParams(no_max_tokens=True, max_tokens=3))


def test_a_structure_without_a_kind_is_refused():
    message = inference_pb2.SamplingParams(structured_outputs=inference_pb2.StructuredOutputs())
    with pytest.raises(InvalidRequestError, match=r"sampling_params\.structured_outputs"):
        params_of(message)
