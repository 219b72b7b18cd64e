"""A beam search over gRPC finds what a search with the model at hand finds, and leaves nothing behind."""

import asyncio
from dataclasses import replace

import pytest
import torch

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.router.config import LimitsConfig
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.beam_search import BeamSearch
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import DeadlineExceededError
from holdfast.worker.request import FinishReason
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica
from tests.loops import on_each_loop
from tests.router.links import test_real_link
from tests.router.links.test_real_link import RealReplica
from tests.router.processor import processor_and_port
from tests.router.site import eventually, num_open_is, refusal, request, site
from tests.worker.scheduler.test_logits_settings import LogitsRunner

PROMPT = [3, 1, 4]
END = 7


def expected(width: int, penalty: float, max_tokens: int) -> BeamSearch:
    """The search, with log-probabilities straight from the pseudo-model."""
    runner = LogitsRunner(1, 1)
    search = BeamSearch(width=width, length_penalty=penalty, max_tokens=max_tokens, end_token_ids=(END,))
    while search.live:
        continuations = []
        for beam in search.live:
            runner.read_back = lambda _, tokens=[*PROMPT, *beam.token_ids]: tokens
            row = torch.log_softmax(runner._logits(None).double(), -1).float()
            continuations.append(list(enumerate(row.tolist())))
        search.advance(continuations)
    return search


@pytest.mark.parametrize("eos", [frozenset({END}), frozenset()], ids=["the model's end", "a stop token"])
@on_each_loop
async def test_the_beams_are_those_of_the_model(eos, monkeypatch):
    monkeypatch.setattr(test_real_link, "INFO", replace(test_real_link.INFO, eos_token_ids=eos))
    stop = [] if eos else [END]
    num_ended = 0
    replica = await RealReplica.start(runner_class=LogitsRunner)
    async with site(replica) as place, AsyncClient(place.router.address) as client:
        for width, n, penalty in ((4, 4, 1.0), (3, 2, 0.0), (2, 1, 2.5), (10, 10, 1.0)):
            wish = SamplingParams(
                n=n, beam_width=width, length_penalty=penalty, max_tokens=9, stop_token_ids=stop, echo=True
            )
            answer = await client.generate(PROMPT, wish)
            beams = expected(width, penalty, 9).best(n)
            assert [one.token_ids for one in answer.completions] == [beam.token_ids for beam in beams]
            for one, beam in zip(answer.completions, beams, strict=True):
                assert one.cumulative_logprob == pytest.approx(beam.logprob)
                assert one.finish_reason is (FinishReason.STOP if beam.has_ended else FinishReason.LENGTH)
                shown = beam.token_ids[:-1] if beam.has_ended else beam.token_ids
                assert one.text == bytes([*PROMPT, *shown]).decode()
            num_ended += sum(beam.has_ended for beam in beams)
            assert answer.usage.num_prompt_tokens == 3
    assert 0 < num_ended < 17, "some beams were meant to end early"


@on_each_loop
async def test_a_search_ends_where_the_context_does():
    async with site(await RealReplica.start(runner_class=LogitsRunner)) as place:
        params = inference_pb2.SamplingParams(beam_width=2, no_max_tokens=True)
        answer = await place.stub.Generate(request([1] * 395, sampling_params=params))
        assert len(answer.completions[0].token_ids) == 5


@on_each_loop
async def test_cancelling_a_search_ends_what_it_has_asked():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        call = place.stub.Generate(request(sampling_params=inference_pb2.SamplingParams(beam_width=4)))
        await replica.until(lambda: bool(replica.running))
        (submit,) = replica.submits
        assert (
            submit.sampling_params.max_tokens,
            submit.sampling_params.logprobs,
            submit.sampling_params.temperature,
        ) == (1, 8, 0)
        call.cancel()
        await eventually(lambda: num_open_is(place, 0))
        await replica.until(lambda: replica.aborted)
        replica.resume()


@on_each_loop
async def test_a_deadline_holds_for_the_whole_search():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        params = inference_pb2.SamplingParams(beam_width=2)
        refused = await refusal(place.stub.Generate(request(sampling_params=params, timeout_ms=30)))
        assert refused.code == "DEADLINE_EXCEEDED"
        replica.resume()


@on_each_loop
async def test_an_answer_says_where_its_beams_were_looked_for():
    async with site(await RealReplica.start(runner_class=LogitsRunner)) as place:
        params = inference_pb2.SamplingParams(beam_width=2, max_tokens=2)
        beams = await place.stub.Generate(request(PROMPT, sampling_params=params))
        drawn = await place.stub.Generate(request(PROMPT))
        assert beams.system_fingerprint == drawn.system_fingerprint != ""
        assert not beams.replayed_without_guarantee


@on_each_loop
async def test_a_router_that_stops_hands_a_search_over():
    """Its client asks another one, rather than waiting for the end of this one."""
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        params = inference_pb2.SamplingParams(beam_width=2)
        call = place.stub.Generate(request(sampling_params=params, attempt=1))
        await replica.until(lambda: bool(replica.running))
        stopping = asyncio.create_task(place.router.stop(grace_s=600, hands_over=True))
        async with asyncio.timeout(10):
            assert (await refusal(call)).reason == "STOPPING"
        await stopping
        replica.resume()


@on_each_loop
async def test_a_search_is_counted_as_any_request():
    async with site(await RealReplica.start(runner_class=LogitsRunner)) as place:
        stats = place.router._request_processor.stats
        params = inference_pb2.SamplingParams(beam_width=2, max_tokens=5)
        answer = await place.stub.Generate(request(PROMPT, sampling_params=params))
        (found,) = (one for one in stats.models.values() if one.num_output_tokens)
        assert found.num_output_tokens == answer.usage.completion_tokens > 5, "whether its beam was kept or not"
        assert found.num_prompt_tokens == len(PROMPT)
        assert dict(found.outcomes) == {"length": 1}
        assert [one.num_values for one in (found.first_token_s, found.output_token_s, found.duration_s)] == [1, 1, 1]
        endless = place.stub.Generate(
            request(PROMPT, sampling_params=inference_pb2.SamplingParams(beam_width=2, no_max_tokens=True))
        )
        await eventually(lambda: num_open_is(place, 2))
        endless.cancel()
        await eventually(lambda: is_counted(found, "cancelled"))
        assert found.first_token_s.num_values <= 2


async def is_counted(found, outcome: str) -> bool:
    return found.outcomes[outcome] == 1


@on_each_loop
async def test_a_search_whose_answer_nobody_takes_ends_after_its_deadline():
    processor, _ = await processor_and_port()
    processor._limits = LimitsConfig(slow_reader_s=0.01)
    wish = GenerationRequest(prompt="hi", sampling_params=SamplingParams(beam_width=2, seed=1), timeout_s=0.01)
    with pytest.raises(DeadlineExceededError, match="slow_reader_s"):
        async with processor.search(wish):
            await asyncio.Event().wait()
    assert processor.stats.models["m"].outcomes["deadline"] == 1
