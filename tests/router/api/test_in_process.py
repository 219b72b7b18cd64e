"""Requests from the router's own process."""

import asyncio
import pickle
from contextlib import aclosing

import pytest

from holdfast.router.request import GenerationRequest
from holdfast.worker.errors import HoldfastError, InvalidRequestError, QueueFullError, UnknownModelError
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica
from tests.loops import on_each_loop
from tests.router.site import expected, site


def request(**fields: object) -> GenerationRequest:
    params = SamplingParams(seed=3, max_tokens=6)
    return GenerationRequest(**({"prompt": "hello", "sampling_params": params} | fields))


@on_each_loop
async def test_whole_and_streamed_answers_are_those_of_every_api():
    async with site(await FakeReplica.start()) as place:
        api = place.router.in_process
        (completion,) = (await api.generate(request())).completions
        assert completion.text == expected("hello", 3, 6)[1]
        chunks = [chunk async for chunk in api.stream(request())]
        assert "".join(chunk.text for chunk in chunks) == completion.text
        assert chunks[-1].usage.num_completion_tokens == 6


@on_each_loop
async def test_leaving_a_stream_or_cancelling_a_call_frees_the_replica():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        api = place.router.in_process
        long = request(sampling_params=SamplingParams(seed=3, max_tokens=50_000))
        async with aclosing(api.stream(long)) as chunks:
            await anext(chunks)
        call = asyncio.create_task(api.generate(long))
        await replica.until(lambda: replica.running)
        call.cancel()
        await asyncio.wait([call])
        await place.until_idle()


@on_each_loop
async def test_what_is_wrong_is_refused_by_name():
    async with site(await FakeReplica.start()) as place:
        with pytest.raises(UnknownModelError, match="served: fake"):
            await place.router.in_process.generate(request(model="other"))
        with pytest.raises(InvalidRequestError, match="best_of"):
            await anext(place.router.in_process.stream(request(sampling_params=SamplingParams(best_of=2))))


@pytest.mark.parametrize(
    "error", [InvalidRequestError("seed", -1, "must be 0"), UnknownModelError("x", ("y",)), QueueFullError("full", 2.0)]
)
def test_errors_cross_processes_as_they_are(error: HoldfastError):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
