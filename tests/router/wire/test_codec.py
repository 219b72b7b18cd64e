"""What the messages of the public API mean, and what a field must not hold."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.chat import Chat
from holdfast.router.config import LimitsConfig
from holdfast.router.request import GenerationRequest, derived_seed
from holdfast.router.resume import ResumeRecord, SequenceRecord
from holdfast.router.wire.request_codec import generation_request, generation_request_message, sampling_params_message
from holdfast.router.wire.response_codec import generation
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.wire.sampling_fields import params_of

HELLO = [{"role": "user", "content": "hello"}]


def parsed(**fields):
    return generation_request(inference_pb2.GenerateRequest(**{"text": "x"} | fields))


# --- requests ---


def test_an_empty_request_takes_the_defaults():
    request = parsed()
    assert request.sampling_params == SamplingParams()
    assert (request.model, request.request_id, request.priority, request.timeout_s) == ("", "", Priority.NORMAL, None)


def test_zero_is_a_value_and_not_unset():
    assert parsed(sampling_params=inference_pb2.SamplingParams(temperature=0)).sampling_params.temperature == 0
    assert parsed(sampling_params=inference_pb2.SamplingParams(seed=0)).sampling_params.seed == 0
    assert parsed(timeout_ms=0).timeout_s == 0


def test_priorities_are_ranked_as_in_the_token_world():
    names = ("UNSPECIFIED", "CRITICAL", "HIGH", "NORMAL", "LOW")
    parsed_ones = [parsed(priority=f"PRIORITY_{name}").priority for name in names]
    assert parsed_ones == [Priority.NORMAL, Priority.CRITICAL, Priority.HIGH, Priority.NORMAL, Priority.LOW]


@given(st.decimals(0, 100, places=4).map(float))
def test_short_decimals_survive_the_32_bits_of_the_wire(temperature):
    message = inference_pb2.SamplingParams(temperature=temperature)
    assert parsed(sampling_params=message).sampling_params.temperature == temperature


@given(st.floats(0, 100, width=32))
def test_any_float_stays_itself_in_32_bits(temperature):
    message = inference_pb2.SamplingParams(temperature=temperature)
    kept = parsed(sampling_params=message).sampling_params.temperature
    assert struct.pack("f", kept) == struct.pack("f", temperature)


def test_a_derived_seed_is_the_same_everywhere_and_in_range():
    assert derived_seed("a") == 2340832890917691671
    assert all(0 <= derived_seed(str(index)) < 2**63 for index in range(1000))


def test_timeouts_are_bounded():
    parsed(timeout_ms=1).check(LimitsConfig())
    parsed(timeout_ms=3_600_000).check(LimitsConfig())
    with pytest.raises(InvalidRequestError, match=r"timeout_ms = 3600001"):
        parsed(timeout_ms=3_600_001).check(LimitsConfig())


def test_what_a_client_has_received_comes_by_sequence():
    progress = inference_pb2.SequenceProgress(token_ids=[1, 2], text_length=3)
    message = inference_pb2.GenerateRequest(
        text="x", resume=inference_pb2.Resume(sequences=[progress], system_fingerprint="f")
    )
    resume = generation_request(message).resume
    assert resume == ResumeRecord(sequences=[SequenceRecord(token_ids=[1, 2], text_length=3)], fingerprint="f")
    assert resume.sequence(1) == SequenceRecord()
    assert generation_request(inference_pb2.GenerateRequest(text="x")).resume is None


def test_an_end_that_no_stream_has_is_refused():
    received = inference_pb2.SequenceProgress(token_ids=[1], finish_reason=99)
    resume = inference_pb2.Resume(sequences=[inference_pb2.SequenceProgress(), received])
    with pytest.raises(InvalidRequestError, match=r"\[1\].finish_reason = 99: .*STOP, .*LENGTH or .*ABORT"):
        generation_request(inference_pb2.GenerateRequest(text="x", resume=resume))


UNSENDABLE = (
    ({"prompt": (-1,)}, "token_ids", "[0, 4294967295]"),
    ({"prompt": (2**32,)}, "token_ids", "[0, 4294967295]"),
    ({"prompt": (1.5,)}, "token_ids", "whole numbers"),
    ({"prompt": "\ud800"}, "text", "valid Unicode"),
    ({"prompt": "x", "timeout_s": 1e10}, "timeout_s", "at most 4294967"),
    ({"chat": Chat(messages=[])}, "chat.messages", "at least one"),
    ({"chat": Chat(messages=[{"role": "user", "content": "\ud800"}])}, "chat", "valid Unicode"),
    ({"chat": Chat(messages=[{"role": "user", "content": [7]}])}, "chat.messages[0].content[0].type", "must be text"),
    ({"chat": Chat(messages=HELLO, template_kwargs={"x": [b"y"]})}, "chat.template_kwargs", "what JSON can say"),
)


@pytest.mark.parametrize(("fields", "field", "limit"), UNSENDABLE)
def test_what_the_wire_has_no_place_for_is_refused_by_name(fields, field, limit):
    with pytest.raises(InvalidRequestError) as refused:
        generation_request_message(GenerationRequest(**fields))
    assert refused.value.field == field
    assert limit in refused.value.limit


def test_numbers_that_mean_all_are_the_largest_that_the_wire_has_and_token_ids_are_refused_by_name():
    params = SamplingParams(max_tokens=2**63, top_k=2**31, truncate_prompt_tokens=10**30, seed=5)
    most = 2**31 - 1
    assert params_of(sampling_params_message(params)) == params.with_changes(
        max_tokens=most, top_k=most, truncate_prompt_tokens=most
    )
    for ids in ({"stop_token_ids": [2**32]}, {"allowed_token_ids": [7, 2**63]}, {"logit_bias": {2**32: 1}}):
        with pytest.raises(InvalidRequestError, match=rf"sampling_params\.{next(iter(ids))} = .*4294967295"):
            sampling_params_message(SamplingParams(max_tokens=2**63, **ids))


def test_a_time_that_is_nearly_over_is_not_none():
    assert generation_request_message(GenerationRequest(prompt="x", timeout_s=-1.0)).timeout_ms == 1


def test_an_answer_without_completions_can_be_read():
    assert generation(inference_pb2.GenerateResponse()).completions == ()


@pytest.mark.parametrize("text", ["[1]", "{", "x", "[" * 60_000])
def test_variables_that_are_no_object_are_refused(text):
    with pytest.raises(InvalidRequestError, match=r"chat.template_kwargs = .*the text of a JSON object"):
        generation_request(inference_pb2.GenerateRequest(chat=inference_pb2.Chat(template_kwargs=text)))
