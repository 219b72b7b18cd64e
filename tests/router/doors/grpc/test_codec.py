"""The messages of the public API to plain data and back."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.client.codec import chunk, generation
from holdfast.router.config import LimitsConfig
from holdfast.router.doors.grpc.codec import generation_request, stream_response, unary_response
from holdfast.router.events import Deliver, Usage
from holdfast.router.request import derived_seed
from holdfast.router.requests.answer import Answer, Completion
from holdfast.router.resume import Progress, Resume
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import (
    InvalidRequestError,
)
from holdfast.worker.request import FinishReason, Priority, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams


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


# --- answers ---


def test_a_chunk_in_the_middle_says_no_more_than_it_knows():
    chunk = stream_response(Deliver(request_id="x", first_token_index=3, token_ids=(7, 8), text="ab"))
    assert chunk == inference_pb2.GenerateStreamResponse(
        request_id="x", first_token_index=3, token_ids=[7, 8], text="ab"
    )
    assert not chunk.HasField("usage")


def whole(delivery: Deliver) -> Answer:
    completions = (Completion(output=delivery),)
    return Answer(request_id="x", model="m", completions=completions, usage=delivery.usage)


def test_the_last_chunk_has_reason_and_usage():
    delivery = Deliver(
        request_id="x",
        first_token_index=3,
        token_ids=(),
        text="",
        finish_reason=FinishReason.STOP,
        usage=Usage(num_prompt_tokens=2, num_completion_tokens=3),
    )
    chunk = stream_response(delivery)
    assert chunk.finish_reason == inference_pb2.FINISH_REASON_STOP
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (2, 3)
    assert unary_response(whole(delivery)).usage == chunk.usage


def test_responses_say_where_they_come_from_and_whether_that_is_certain():
    usage = Usage(num_prompt_tokens=1, num_completion_tokens=1)
    delivery = Deliver(
        request_id="x",
        first_token_index=0,
        token_ids=(1,),
        text="a",
        finish_reason=FinishReason.STOP,
        usage=usage,
        fingerprint="m/tp2",
        identity_guaranteed=False,
    )
    for message in (stream_response(delivery), unary_response(whole(delivery))):
        assert (message.replayed_without_guarantee, message.system_fingerprint) == (True, "m/tp2")


def test_what_a_client_has_received_comes_by_sequence():
    progress = inference_pb2.SequenceProgress(token_ids=[1, 2], text_length=3)
    message = inference_pb2.GenerateRequest(
        text="x", resume=inference_pb2.Resume(sequences=[progress], system_fingerprint="f")
    )
    resume = generation_request(message).resume
    assert resume == Resume(sequences=(Progress(token_ids=(1, 2), text_length=3),), fingerprint="f")
    assert resume.progress(1) == Progress()
    assert generation_request(inference_pb2.GenerateRequest(text="x")).resume is None


@pytest.mark.parametrize("value", [inference_pb2.FINISH_REASON_ABORT, 99])
def test_an_end_that_no_stream_has_is_refused(value):
    received = inference_pb2.SequenceProgress(token_ids=[1], finish_reason=value)
    resume = inference_pb2.Resume(sequences=[inference_pb2.SequenceProgress(), received])
    with pytest.raises(InvalidRequestError, match=rf"\[1\].finish_reason = {value}: .*STOP or .*LENGTH"):
        generation_request(inference_pb2.GenerateRequest(text="x", resume=resume))


def test_logprobs_are_in_chunks_and_in_whole_answers():
    said = TokenLogprob(token_id=7, logprob=-1.5, rank=3, top=((4, -0.25), (2, -math.inf)))
    usage = Usage(num_prompt_tokens=2, num_completion_tokens=1)
    delivery = Deliver(request_id="x", first_token_index=0, token_ids=(7,), text="a", usage=usage, logprobs=(said,))
    top = [{"token_id": 4, "logprob": -0.25}, {"token_id": 2, "logprob": -math.inf}]
    message = inference_pb2.TokenLogprob(token_id=7, logprob=-1.5, rank=3, top=top)
    assert list(stream_response(delivery).logprobs) == [message]
    assert list(unary_response(whole(delivery)).completions[0].logprobs) == [message]


def test_what_is_said_of_the_prompt_is_in_chunks_and_in_whole_answers():
    said = TokenLogprob(token_id=7, logprob=-1.5, rank=3)
    usage = Usage(num_prompt_tokens=2, num_completion_tokens=1)
    delivery = Deliver(
        request_id="x",
        first_token_index=0,
        token_ids=(7,),
        text="a",
        finish_reason=FinishReason.STOP,
        usage=usage,
        prompt_logprobs=(said,),
    )
    message = inference_pb2.TokenLogprob(token_id=7, logprob=-1.5, rank=3)
    assert list(stream_response(delivery).prompt_logprobs) == [message]
    assert list(unary_response(whole(delivery)).completions[0].prompt_logprobs) == [message]
    for asked, expected in ((2, (None, said)), (None, ())):
        params = SamplingParams(prompt_logprobs=asked)
        assert chunk(stream_response(delivery), params).prompt_logprobs == expected
        assert generation(unary_response(whole(delivery)), params).prompt_logprobs == expected
