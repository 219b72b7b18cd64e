"""Every API tells in its own place how a request went: times, tokens by where they came from, guesses, attempts."""

import pytest

from holdfast import LLM, SamplingParams
from holdfast.cluster.client.async_client import AsyncClient
from tests.fakes import LENGTH, FakeReplica
from tests.loops import on_a_loop
from tests.router.api.http.test_messages_and_responses import claude
from tests.router.api.http.test_openai_sdk import HELLO, openai_site
from tests.router.api.open_inference.messages import infer, stream, unary
from tests.router.site import collected, request

TIMES = ("queue_time", "prompt_time", "time_to_first_token", "completion_time", "total_time")
CACHED, ON_DISK, DRAFTED, ACCEPTED = 4, 3, 7, 5


class TellingReplica(FakeReplica):
    """Tells of cached tokens, some of them from the disk, and of guesses."""

    def _advance(self, attempt):
        delta = super()._advance(attempt)
        if delta.first_token_index == 0:
            delta.num_cached_tokens, delta.num_disk_tokens = CACHED, ON_DISK
        if delta.finish_reason == LENGTH:
            delta.num_draft_tokens, delta.num_accepted_tokens = DRAFTED, ACCEPTED
        return delta


def checked_times(usage) -> None:
    times = [usage.model_extra[name] for name in TIMES]
    queue, prompt, first, decode, total = times
    assert min(times) >= 0, times
    assert 0 <= first <= total
    assert queue + prompt + decode == pytest.approx(total, abs=0.01)
    assert usage.model_extra["attempts"] == 1


def checked_openai(usage, of_prompt, of_output) -> None:
    checked_times(usage)
    assert (of_prompt.cached_tokens, of_prompt.model_extra["disk_tokens"]) == (CACHED, ON_DISK)
    accepted, rejected = (
        getattr(of_output, f"{name}_prediction_tokens", None) or of_output.model_extra[f"{name}_prediction_tokens"]
        for name in ("accepted", "rejected")
    )
    assert (accepted, rejected) == (ACCEPTED, DRAFTED - ACCEPTED)


@on_a_loop
async def test_openais_apis_and_anthropics_tell_it_in_their_usage_whole_and_streamed():
    async with openai_site(await TellingReplica.start()) as (place, client), claude(place) as anthropics:
        chat = {"model": "fake", "messages": HELLO, "max_tokens": 4}
        text = {"model": "fake", "prompt": "hello", "max_tokens": 4}
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        for create, body in ((client.chat.completions.create, chat), (client.completions.create, text)):
            usages = [(await create(**body)).usage, [one async for one in await create(**body, **asked)][-1].usage]
            for usage in usages:
                checked_openai(usage, usage.prompt_tokens_details, usage.completion_tokens_details)
        spoken = {"model": "fake", "input": "hello", "max_output_tokens": 4}
        events = [event async for event in await client.responses.create(**spoken, stream=True)]
        for usage in ((await client.responses.create(**spoken)).usage, events[-1].response.usage):
            checked_openai(usage, usage.input_tokens_details, usage.output_tokens_details)
        whole = await anthropics.messages.create(**chat)
        async with anthropics.messages.stream(**chat) as stream:
            ended = [event async for event in stream if event.type == "message_delta"][-1]
        for usage in (whole.usage, ended.usage):
            checked_times(usage)
            told = usage.model_extra
            read = {"memory_input_tokens": CACHED - ON_DISK, "disk_input_tokens": ON_DISK}
            assert (usage.cache_read_input_tokens, told["cache_read"]) == (CACHED, read)
            assert told["accepted_prediction_tokens"] == ACCEPTED


@on_a_loop
async def test_grpc_tells_it_in_usage_and_open_inference_in_parameters_of_its_last_answer():
    async with openai_site(await TellingReplica.start()) as (place, _), AsyncClient(place.router.address) as client:
        whole, chunks = await place.stub.Generate(request()), await collected(place.stub.GenerateStream(request()))
        found = [whole.usage.figures, chunks[-1].usage.figures]
        for one in found:
            assert (one.disk_tokens, one.draft_tokens, one.accepted_tokens, one.attempts) == (3, 7, 5, 1)
            assert 0 <= one.first_token_s <= one.total_s
        read = (await client.generate("hello", SamplingParams(max_tokens=4))).usage
        assert (read.num_cached_tokens, read.figures.num_disk_tokens, read.figures.num_attempts) == (4, 3, 1)
        answer = await unary(place, "ModelInfer")(infer(model_name="fake"))
        last = [one.infer_response async for one in stream(place, iter([infer(stream=True)]))][-1]
        for told in (answer.parameters, last.parameters):
            assert (told["cached_tokens"].int64_param, told["disk_tokens"].int64_param) == (CACHED, ON_DISK)
            assert (told["accepted_tokens"].int64_param, told["attempts"].int64_param) == (ACCEPTED, 1)
            assert 0 <= told["first_token_s"].double_param <= told["total_s"].double_param


@on_a_loop
async def test_a_request_that_went_on_elsewhere_had_two_attempts():
    replicas = [await TellingReplica.start(name) for name in ("one", "two")]
    async with openai_site(*replicas) as (place, _), AsyncClient(place.router.address) as client:
        answer = client.stream("hello", SamplingParams(max_tokens=60, seed=1))
        await anext(answer)
        busy = next(replica for replica in replicas if replica.submits)
        await busy.kill()
        place.replicas.remove(busy)
        figures = [delta async for delta in answer][-1].usage.figures
    assert (figures.num_attempts, figures.num_accepted_tokens, figures.num_disk_tokens) == (2, ACCEPTED, ON_DISK)


def test_an_engine_of_its_own_tells_it_too_with_the_guesses_that_came_true():
    with LLM("demo", speculative="suffix") as llm:
        prompt, params = "The capital of France is Paris. " * 4, SamplingParams(temperature=0, max_tokens=24)
        (first,), (again,) = (llm.generate([prompt], params, use_tqdm=False) for _ in range(2))
        stats = llm.get_stats()
    figures = again.metrics.figures
    told = [one.metrics.figures for one in (first, again)]
    assert sum(one.num_draft_tokens for one in told) == stats.num_draft_tokens > 0
    assert sum(one.num_accepted_tokens for one in told) == stats.num_accepted_tokens > 0
    assert again.num_cached_tokens > 0 == figures.num_disk_tokens
    assert 0 <= figures.first_token_s <= figures.total_s > 0
