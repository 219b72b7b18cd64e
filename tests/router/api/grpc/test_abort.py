"""Abort: whoever knows its id ends a request after what it has, on this router."""

import asyncio

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.v1 import inference_pb2
from tests.fakes import FakeReplica
from tests.loops import on_a_loop, on_each_loop
from tests.router.api.open_inference.messages import infer, stream, text, values
from tests.router.links.test_real_link import RealReplica
from tests.router.site import collected, eventually, expected, num_open_is, refusal, request, site
from tests.worker.scheduler.test_logits_settings import LogitsRunner

ABORT = inference_pb2.FINISH_REASON_ABORT


async def abort(place, request_id: str) -> bool:
    return (await place.stub.Abort(inference_pb2.AbortRequest(request_id=request_id))).was_open


@on_each_loop
async def test_a_stream_ends_after_what_it_has_and_is_off_the_replica_within_a_step():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        call = place.stub.GenerateStream(request("hello", max_tokens=10**6, request_id="mine"))
        await replica.until(lambda: replica.num_tokens > 5)
        (attempt,) = replica.running
        num_steps = replica.num_steps
        assert await abort(place, "mine")
        chunks = await collected(call)
        assert [chunk.finish_reason for chunk in chunks] == [0] * (len(chunks) - 1) + [ABORT]
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert (token_ids, "".join(chunk.text for chunk in chunks)) == expected("hello", 1, len(token_ids))
        assert chunks[-1].usage.completion_tokens == len(token_ids) > 0
        await replica.until(lambda: replica.aborted == [attempt])
        assert replica.num_steps - num_steps < 100
        assert not await abort(place, "mine"), "it is over"


@on_each_loop
async def test_all_completions_of_a_request_end_and_other_requests_go_on():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        params = inference_pb2.SamplingParams(max_tokens=10**6, seed=1, n=3)
        mine = asyncio.ensure_future(place.stub.Generate(request(sampling_params=params, request_id="mine")))
        other = place.stub.GenerateStream(request(max_tokens=10**6, request_id="other"))
        await replica.until(lambda: len(replica.running) == 4 and replica.num_tokens > 20)
        assert await abort(place, "mine")
        answer = await mine
        assert [item.finish_reason for item in answer.completions] == [ABORT] * 3
        assert answer.usage.completion_tokens == sum(len(item.token_ids) for item in answer.completions) > 0
        await replica.until(lambda: len(replica.running) == 1)
        other.cancel()


@on_each_loop
async def test_a_request_in_the_queue_ends_without_output():
    replica = await FakeReplica.start()
    replica.pause()
    config, limits = RouterConfig(max_waiting_per_replica=1), LimitsConfig(max_queued=1)
    async with site(replica, config=config, limits=limits) as place:
        runs = place.stub.Generate(request())
        await replica.until(lambda: replica.running)
        waits = place.stub.GenerateStream(request(request_id="waits"))
        await eventually(lambda: num_open_is(place, 2))
        assert await abort(place, "waits")
        (chunk,) = await collected(waits)
        assert (chunk.finish_reason, chunk.text, list(chunk.token_ids)) == (ABORT, "", [])
        replica.resume()
        assert (await runs).usage.completion_tokens == 8


@on_each_loop
async def test_unknown_ids_are_nobodys_and_no_id_is_refused():
    async with site(await FakeReplica.start()) as place:
        assert not await abort(place, "nobody")
        refused = await refusal(place.stub.Abort(inference_pb2.AbortRequest()))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "request_id")


@on_a_loop
async def test_a_beam_search_ends_with_the_best_beams_so_far():
    async with site(await RealReplica.start(runner_class=LogitsRunner)) as place:
        params = inference_pb2.SamplingParams(max_tokens=380, beam_width=3, n=2, ignore_eos=True)
        asked = request([1, 2], sampling_params=params, request_id="beams")
        searching = asyncio.ensure_future(place.stub.Generate(asked))
        engine = place.replicas[0].engine

        async def has_steps() -> bool:
            return engine.stats().num_tokens_generated > 6

        await eventually(has_steps)
        assert await abort(place, "beams")
        answer = await searching
        assert [item.finish_reason for item in answer.completions] == [ABORT] * 2
        assert 0 < len(answer.completions[0].token_ids) < 380


@on_each_loop
async def test_a_request_of_another_protocol_can_be_aborted_by_its_id():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        sampling = {"max_tokens": 10**6, "seed": 1}
        asked = [infer(stream=True, sampling=sampling, return_finish_reason=True)]
        call = stream(place, iter(asked), metadata=(("x-request-id", "mine"),))
        await replica.until(lambda: replica.num_tokens > 50)
        assert await abort(place, "mine/0")
        answers = [item async for item in call]
        assert values(answers[-1].infer_response)["finish_reason"] == [b"abort"]
        assert text(answers) == expected("hello", 1, len(text(answers)))[1] != ""
