"""Several completions of one request, from client to replica and back."""

import asyncio
from dataclasses import replace

import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.request_stream import OutputStream
from holdfast.router.generation import OutputDelta, Usage
from holdfast.router.requests.answer import SampledAnswer
from holdfast.v1 import engine_pb2, inference_pb2
from holdfast.worker.errors import ReplicaError
from holdfast.worker.request import FinishReason, SequenceKey, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica, fake_tokens
from tests.loops import on_each_loop
from tests.router.answers import new_answer, read_from
from tests.router.links.test_real_link import RealReplica
from tests.router.site import collected, eventually, num_open_is, refusal, request, site
from tests.worker.scheduler.test_logits_settings import LogitsRunner


def params(max_tokens: int = 8, seed: int = 1, **fields) -> dict:
    return {"sampling_params": inference_pb2.SamplingParams(max_tokens=max_tokens, seed=seed, **fields)}


@on_each_loop
async def test_completion_i_is_what_seed_plus_i_would_have_drawn():
    async with site(await RealReplica.start(runner_class=LogitsRunner)) as place:
        answer = await place.stub.Generate(request([3, 1], **params(n=4, seed=7, max_tokens=12)))
        assert [completion.sequence_index for completion in answer.completions] == [0, 1, 2, 3]
        for index, completion in enumerate(answer.completions):
            alone = await place.stub.Generate(request([3, 1], **params(seed=7 + index, max_tokens=12)))
            assert completion.token_ids == alone.completions[0].token_ids
        assert len({tuple(completion.token_ids) for completion in answer.completions}) == 4
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 48)


@on_each_loop
async def test_chunks_take_turns_and_the_very_last_has_the_usage():
    async with site(await FakeReplica.start(), await FakeReplica.start("r1")) as place:
        call = place.stub.GenerateStream(request("hello", **params(n=3, max_tokens=30), request_id="mine"))
        chunks = await collected(call)
        for index in range(3):
            own = [chunk for chunk in chunks if chunk.sequence_index == index]
            tokens = [token_id for chunk in own for token_id in chunk.token_ids]
            assert tokens == fake_tokens(b"hello", 1 + index, 30)
            firsts = [sum(len(chunk.token_ids) for chunk in own[:number]) for number in range(len(own))]
            assert [chunk.first_token_index for chunk in own] == firsts
            assert [chunk.finish_reason for chunk in own] == [0] * (len(own) - 1) + [2]
        assert {chunk.request_id for chunk in chunks} == {"mine"}
        assert [chunk.HasField("usage") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 90)
        order = [chunk.sequence_index for chunk in chunks]
        assert order != sorted(order), "they were meant to come in turns"
        homes = [len(replica.submits) for replica in place.replicas]
        assert sorted(homes) == [0, 3], "siblings share their prompt on one replica"
        (home,) = [replica for replica in place.replicas if replica.submits]
        assert [submit.group_id for submit in home.submits] == ["0:0:mine"] * 3


@on_each_loop
async def test_the_best_by_mean_log_probability_are_returned_best_first():
    async with site(await RealReplica.start(runner_class=LogitsRunner)) as place:
        fields = {"max_tokens": 6, "seed": 3, "temperature": 2.0}
        every = await place.stub.Generate(request([3, 1], **params(n=6, logprobs=0, **fields)))
        best = sorted(every.completions, key=lambda one: -sum(item.logprob for item in one.logprobs))[:2]
        assert {one.sequence_index for one in best} != {0, 1}, "the seed was meant to choose others than the first"
        answer = await place.stub.Generate(request([3, 1], **params(n=2, best_of=6, **fields)))
        assert [one.token_ids for one in answer.completions] == [one.token_ids for one in best]
        assert [one.sequence_index for one in answer.completions] == [0, 1]
        for one, known in zip(answer.completions, best, strict=True):
            assert not one.logprobs, "they were not asked for"
            assert one.cumulative_logprob == pytest.approx(sum(item.logprob for item in known.logprobs))
        assert answer.usage.completion_tokens == 36, "those that were not chosen have been drawn as well"


@on_each_loop
async def test_cancelling_ends_all_completions():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        call = place.stub.GenerateStream(request("hello", **params(n=5, max_tokens=60_000)))
        await anext(aiter(call))
        assert await num_open_is(place, 5)
        call.cancel()
        await eventually(lambda: num_open_is(place, 0))
        await replica.until(lambda: len(replica.aborted) == 5)


@on_each_loop
async def test_a_deadline_ends_all_completions():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        refused = await refusal(place.stub.Generate(request("hello", **params(n=3), timeout_ms=500)))
        assert refused.code == "DEADLINE_EXCEEDED"
        await replica.until(lambda: len(replica.aborted) == 3)
        replica.resume()


@on_each_loop
async def test_one_completion_that_fails_ends_the_others():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        call = asyncio.ensure_future(refusal(place.stub.Generate(request("hello", **params(n=3, max_tokens=60_000)))))
        await replica.until(lambda: len(replica.running) == 3)
        (_, attempt, _) = replica.running
        rejection = engine_pb2.Rejection(attempt=attempt, field="prompt", message="cannot be")
        replica.say(engine_pb2.StepUpdate(rejections=[rejection]))
        assert (await call).field == "prompt"
        await replica.until(lambda: len(replica.aborted) == 2)
        replica.running.clear()


@on_each_loop
async def test_siblings_that_cannot_all_be_queued_leave_nothing_open():
    config, limits = RouterConfig(max_waiting_per_replica=1), LimitsConfig(max_queued=1)
    async with site(await FakeReplica.start(), config=config, limits=limits) as place:
        refused = await refusal(place.stub.Generate(request("hello", **params(n=3))))
        assert refused.code == "RESOURCE_EXHAUSTED"
        assert await num_open_is(place, 0)


@on_each_loop
async def test_echo_puts_the_prompt_before_each_completion_once():
    async with site(await FakeReplica.start()) as place:
        plain = await place.stub.Generate(request("hello", **params(n=2)))
        echoed = await place.stub.Generate(request("hello", **params(n=2, echo=True)))
        assert [one.text for one in echoed.completions] == ["hello" + one.text for one in plain.completions]
        assert [one.token_ids for one in echoed.completions] == [one.token_ids for one in plain.completions]
        chunks = await collected(place.stub.GenerateStream(request(list(b"hello"), **params(n=2, echo=True))))
        for index, one in enumerate(echoed.completions):
            assert "".join(chunk.text for chunk in chunks if chunk.sequence_index == index) == one.text


@on_each_loop
async def test_a_truncated_prompt_is_its_end():
    async with site(await FakeReplica.start()) as place:
        fields = params(truncate_prompt_tokens=3, echo=True)
        answer = await place.stub.Generate(request("hello", **fields))
        assert bytes(place.replicas[0].submits[0].prompt_token_ids) == b"llo"
        assert answer.completions[0].text.startswith("llo")
        assert answer.usage.prompt_tokens == 3
        place.replicas[0].max_model_len = 100_000
        long = await place.stub.Generate(request("x" * 100_005, **params(truncate_prompt_tokens=-1)))
        assert long.usage.prompt_tokens == 100_000 - 8


# --- what is said of the prompt ---


def answer_of(num_streams: int, **given) -> tuple[list[OutputStream], SampledAnswer]:
    answer = new_answer("r", **given)
    streams = [OutputStream(SequenceKey("", "r", 0, index), answer) for index in range(num_streams)]
    for index, stream in enumerate(streams):
        stream.index = index
    read_from(answer, streams)
    return streams, answer


def told(*deltas: OutputDelta, **given) -> SampledAnswer:
    streams, answer = answer_of(len(deltas), **given)
    for stream, delta in zip(streams, deltas, strict=True):
        stream.push(delta._replace(request_id=stream.key.request_id))
    return answer


@on_each_loop
async def test_what_is_said_of_the_prompt_goes_with_the_first_that_is_returned():
    usage = Usage(num_prompt_tokens=2, num_completion_tokens=1)
    core = {"request_id": "", "first_token_index": 0, "token_ids": (5,), "text": "", "usage": usage}
    unlikely = OutputDelta(
        **core, finish_reason=FinishReason.LENGTH, logprobs=(said(-2.0),), prompt_logprobs=(said(-9.0),)
    )
    likely = OutputDelta(**core, finish_reason=FinishReason.LENGTH, logprobs=(said(-1.0),))
    answer = await told(unlikely, likely, n=2, best_of=2, prompt_logprobs=0).whole()
    assert [one.prompt_logprobs for one in answer.completions] == [(said(-9.0),), ()]
    answer = await told(unlikely, likely, n=1, best_of=2, prompt_logprobs=0).whole()
    (best,) = answer.completions
    assert (best.cumulative_logprob, best.prompt_logprobs) == (-1.0, (said(-9.0),))


def said(logprob: float) -> TokenLogprob:
    return TokenLogprob(token_id=5, logprob=logprob, rank=1)


@on_each_loop
async def test_an_error_of_any_stream_is_raised():
    streams, answer = answer_of(2, n=2)
    reader = asyncio.create_task(answer.whole())
    await asyncio.sleep(0)
    streams[1].fail(ReplicaError("lost"))
    with pytest.raises(ReplicaError, match="lost"):
        await reader


# --- the client ---


@on_each_loop
async def test_the_client_has_all_completions_streamed_or_whole():
    async with site(await RealReplica.start(runner_class=LogitsRunner)) as place:
        wish = SamplingParams(n=3, seed=2, max_tokens=9, logprobs=1)
        async with AsyncClient(place.router.address) as client:
            whole = await client.generate([3, 1], wish, request_id="r")
            chunks = [chunk async for chunk in client.stream([3, 1], wish)]
            ranked = await client.generate([3, 1], replace(wish, best_of=9, logprobs=None))
            endless = await client.generate([3, 1], SamplingParams(max_tokens=None, seed=1))
        assert (whole.request_id, whole.model, whole.usage) == ("r", "pseudo", chunks[-1].usage)
        for completion in whole.completions:
            own = [chunk for chunk in chunks if chunk.sequence_index == completion.sequence_index]
            assert sum((chunk.token_ids for chunk in own), ()) == completion.token_ids
            assert sum((chunk.logprobs for chunk in own), ()) == completion.logprobs
            assert completion.finish_reason is FinishReason.LENGTH
        sums = [completion.cumulative_logprob for completion in ranked.completions]
        assert sums == sorted(sums, reverse=True)
        assert len(endless.completions[0].token_ids) == 398, "as many as the context holds"
