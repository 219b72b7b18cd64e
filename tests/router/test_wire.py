"""Messages to plain data and back, and errors to statuses."""

import math
import struct

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from cluster.wire import chunk, generation
from holdfast_pb import engine_pb2, inference_pb2
from router import status
from router.answer import Answer, Completion
from router.config import LimitsConfig
from router.events import Deliver, Likelihood, SendSubmit, Usage
from router.request import derived_seed
from router.resume import Progress, Resume
from router.status import call_status
from router.wire import (
    generation_request,
    replica_facts,
    step_news,
    stream_response,
    submit_message,
    unary_response,
)
from worker.errors import (
    CapacityError,
    ConfigurationError,
    DeadlineExceededError,
    HoldfastError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    ReplicaError,
    RequestAbortedError,
    RequestQuarantinedError,
    RequestSupersededError,
    UnknownModelError,
    UnsupportedModelError,
)
from worker.request import EngineRequest, FinishReason, Priority, TokenLogprob
from worker.sampling_params import SamplingParams


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


def test_facts_name_all_that_bits_depend_on():
    hello = engine_pb2.Hello(model="m", tensor_parallel_size=2, row_invariant=True, numerics="float32/cpu/12ab")
    assert replica_facts(hello).fingerprint == "m/tp2/float32/cpu/12ab/row-invariant"


def test_logprobs_are_in_chunks_and_in_whole_answers():
    said = TokenLogprob(token_id=7, logprob=-1.5, rank=3, top=((4, -0.25), (2, -math.inf)))
    usage = Usage(num_prompt_tokens=2, num_completion_tokens=1)
    delivery = Deliver(request_id="x", first_token_index=0, token_ids=(7,), text="a", usage=usage, logprobs=(said,))
    top = [{"token_id": 4, "logprob": -0.25}, {"token_id": 2, "logprob": -math.inf}]
    message = inference_pb2.TokenLogprob(token_id=7, logprob=-1.5, rank=3, top=top)
    assert list(stream_response(delivery).logprobs) == [message]
    assert list(unary_response(whole(delivery)).completions[0].logprobs) == [message]


# --- the link ---


def test_a_submission_carries_all_that_a_draw_depends_on_and_the_tokens_so_far():
    params = SamplingParams(temperature=0.7, top_k=4, top_p=0.3, seed=2**63 - 1, max_tokens=None, stop_token_ids=[9])
    request = EngineRequest(
        request_id="x",
        prompt_token_ids=(1, 2),
        sampling_params=params,
        priority=Priority.LOW,
        output_token_ids=(3, 4),
        tenant="gold",
        time_left_s=1.5,
    )
    submit = submit_message(SendSubmit(replica_id="r", attempt=2**63, request=request)).submit
    draw = engine_pb2.DrawSettings(
        temperature=0.7, top_k=4, top_p=0.3, seed=2**63 - 1, max_tokens=0, stop_token_ids=[9]
    )
    assert submit == engine_pb2.Submit(
        attempt=2**63,
        prompt_token_ids=[1, 2],
        output_token_ids=[3, 4],
        draw=draw,
        priority=3,
        tenant="gold",
        time_left_ms=1500,
    )


def test_a_step_becomes_news():
    update = engine_pb2.StepUpdate(
        deltas=[engine_pb2.Delta(attempt=1, first_token_index=2, token_ids=[5, 6], finish_reason=2)],
        load=engine_pb2.Load(num_running=1, num_waiting=2, num_waiting_tokens=3, num_free_blocks=4, num_total_blocks=5),
    )
    news = step_news(update)
    (delta,) = news.deltas
    assert (delta.attempt, delta.first_token_index, delta.token_ids) == (1, 2, (5, 6))
    assert delta.finish_reason is FinishReason.LENGTH
    assert (news.load.num_running, news.load.num_waiting, news.load.num_waiting_tokens) == (1, 2, 3)
    assert (news.load.num_free_blocks, news.load.num_total_blocks) == (4, 5)


def test_logprobs_come_with_the_tokens_that_they_are_of():
    said = engine_pb2.DrawnLogprob(logprob=-1.5, rank=3, top_token_ids=[4, 2], top_logprobs=[-0.25, -math.inf])
    bare = engine_pb2.DrawnLogprob(logprob=-0.5, rank=1)
    delta = engine_pb2.Delta(attempt=1, token_ids=[5, 6], logprobs=[said, bare])
    assert step_news(engine_pb2.StepUpdate(deltas=[delta])).deltas[0].logprobs == (
        TokenLogprob(token_id=5, logprob=-1.5, rank=3, top=((4, -0.25), (2, -math.inf))),
        TokenLogprob(token_id=6, logprob=-0.5, rank=1),
    )


def test_rejections_say_whose_fault_it_is():
    rejections = [
        engine_pb2.Rejection(attempt=1, field="prompt", message="is too long"),
        engine_pb2.Rejection(attempt=2, message="the queue is full", retry_after_ms=1500),
        engine_pb2.Rejection(attempt=3, message="the engine has ended"),
        engine_pb2.Rejection(attempt=4, message="time was up", deadline_exceeded=True),
    ]
    invalid, full, lost, late = (
        item.error for item in step_news(engine_pb2.StepUpdate(rejections=rejections)).rejections
    )
    assert isinstance(invalid, InvalidRequestError)
    assert (invalid.field, invalid.limit) == ("prompt", "is too long")
    assert isinstance(full, QueueFullError)
    assert full.retry_after_s == 1.5
    assert isinstance(lost, ReplicaError)
    assert isinstance(late, DeadlineExceededError)


# --- statuses ---

STATUSES = [
    (InvalidRequestError("a.b", 0, "must be 1"), "INVALID_ARGUMENT", "INVALID_REQUEST"),
    (UnknownModelError("x", ("m",)), "NOT_FOUND", "UNKNOWN_MODEL"),
    (ConfigurationError("x"), "FAILED_PRECONDITION", "CONFIGURATION"),
    (UnsupportedModelError("t", "r", "w"), "FAILED_PRECONDITION", "UNSUPPORTED_MODEL"),
    (QueueFullError("x", 2.5), "RESOURCE_EXHAUSTED", "QUEUE_FULL"),
    (CapacityError("x"), "RESOURCE_EXHAUSTED", "CAPACITY"),
    (ReplicaError("x"), "UNAVAILABLE", "REPLICA_UNAVAILABLE"),
    (DeadlineExceededError("x"), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
    (RequestAbortedError("x"), "UNAVAILABLE", "STOPPING"),
    (RequestSupersededError("x"), "ABORTED", "SUPERSEDED"),
    (RequestQuarantinedError("x"), "INTERNAL", "QUARANTINED"),
    (InternalError("x"), "INTERNAL", "INTERNAL"),
]


def every_error(kind=HoldfastError) -> set[type]:
    return {kind}.union(*(every_error(below) for below in kind.__subclasses__()))


@pytest.mark.parametrize(("error", "code", "reason"), STATUSES, ids=lambda value: str(value)[:20])
def test_each_error_has_its_code_and_reason(error, code, reason):
    answer = call_status(error)
    assert answer.code is grpc.StatusCode[code]
    assert answer.message == str(error)
    details = Status.FromString(dict(answer.trailing_metadata)["grpc-status-details-bin"])
    assert (details.code, details.message) == (answer.code.value[0], str(error))
    info = ErrorInfo()
    assert details.details[0].Unpack(info)
    assert (info.reason, info.domain, info.metadata["fault"]) == (reason, "holdfast", error.fault.value)


def test_every_error_of_the_tree_has_a_status():
    assert {kind for kind in every_error() if kind.__module__ == "worker.errors"} == status.CODES.keys()


def test_a_bad_field_is_named_in_the_details():
    trailers = dict(call_status(InvalidRequestError("a.b", 0, "must be 1")).trailing_metadata)
    bad = BadRequest()
    assert Status.FromString(trailers["grpc-status-details-bin"]).details[1].Unpack(bad)
    assert [(violation.field, violation.description) for violation in bad.field_violations] == [("a.b", "must be 1")]
    assert "grpc-retry-pushback-ms" not in trailers


def test_what_may_be_tried_again_says_when():
    trailers = dict(call_status(QueueFullError("x", 2.5)).trailing_metadata)
    retry = RetryInfo()
    assert Status.FromString(trailers["grpc-status-details-bin"]).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500
    assert trailers["grpc-retry-pushback-ms"] == "2500"


def test_what_is_said_of_the_prompt_comes_up_the_link():
    items = [{"logprob": -1.5, "rank": 3, "top_token_ids": [4], "top_logprobs": [-0.25]}, {"logprob": -2.0, "rank": 1}]
    delta = engine_pb2.Delta(attempt=1, token_ids=[7], prompt_logprobs=items)
    (news,) = step_news(engine_pb2.StepUpdate(deltas=[delta])).deltas
    assert news.prompt_logprobs == [
        Likelihood(logprob=-1.5, rank=3, top=((4, -0.25),)),
        Likelihood(logprob=-2.0, rank=1, top=()),
    ]


def test_a_sibling_tells_its_group_and_what_it_asks_of_the_prompt():
    params = SamplingParams(seed=1, prompt_logprobs=0)
    request = EngineRequest(request_id="r/0", prompt_token_ids=(1,), sampling_params=params, group_id="r")
    submit = submit_message(SendSubmit(replica_id="r0", attempt=1, request=request)).submit
    assert submit.group_id == "r"
    assert submit.draw.HasField("prompt_logprobs")
    assert not submit_message(SendSubmit(replica_id="r0", attempt=1, request=plain_request())).submit.draw.HasField(
        "prompt_logprobs"
    )


def plain_request() -> EngineRequest:
    return EngineRequest(request_id="r", prompt_token_ids=(1,), sampling_params=SamplingParams(seed=1))


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
