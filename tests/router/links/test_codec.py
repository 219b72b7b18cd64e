"""The messages of the link to replicas: plain data and back."""

import math

from holdfast.router.events import Likelihood, SendSubmit
from holdfast.router.links.codec import replica_facts, step_news, submit_message
from holdfast.v1 import engine_pb2
from holdfast.worker.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QueueFullError,
    ReplicaError,
)
from holdfast.worker.request import EngineRequest, FinishReason, Priority, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.suspicion import Suspicion


def test_facts_name_all_that_bits_depend_on():
    hello = engine_pb2.Hello(model="m", tensor_parallel_size=2, row_invariant=True, numerics="float32/cpu/12ab")
    assert replica_facts(hello).fingerprint == "m/tp2/float32/cpu/12ab/row-invariant"
    hello.answers_digest = bytes.fromhex("36cb808c")
    assert replica_facts(hello).fingerprint == "m/tp2/float32/cpu/12ab/36cb808c/row-invariant"


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
        suspicion=Suspicion.ON_TRIAL,
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
        suspicion=engine_pb2.SUSPICION_ON_TRIAL,
    )


def test_a_step_becomes_news():
    update = engine_pb2.StepUpdate(
        deltas=[engine_pb2.Delta(attempt=1, first_token_index=2, token_ids=[5, 6], finish_reason=2)],
        load=engine_pb2.Load(
            num_running=1,
            num_waiting=2,
            num_waiting_tokens=3,
            num_free_blocks=4,
            num_total_blocks=5,
            num_foreign_suspects=6,
        ),
    )
    news = step_news(update)
    (delta,) = news.deltas
    assert (delta.attempt, delta.first_token_index, delta.token_ids) == (1, 2, (5, 6))
    assert delta.finish_reason is FinishReason.LENGTH
    assert (news.load.num_running, news.load.num_waiting, news.load.num_waiting_tokens) == (1, 2, 3)
    assert (news.load.num_free_blocks, news.load.num_total_blocks) == (4, 5)
    assert news.load.num_foreign_suspects == 6


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
