"""Many requests whose time is short, over real gRPC on the loop that serves: nobody else is harmed by them."""

import asyncio

import grpc
import pytest

from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.site import Site, collected, expected, request, site

NUM_STREAMS = 8
NUM_TOKENS = 600
ENDLESS = 90_000
"""Tokens that no request of a storm ever gets."""

STORMS = {
    "64 of 0.5 s": [0.5] * 64,
    "300 of 0.1 to 1 s": [0.1 + 0.003 * number for number in range(300)],
    "400 of 1 to 3 ms": [0.001 + 0.000005 * number for number in range(400)],
}


async def expire(place: Site, seed: int, timeout_s: float) -> str:
    """How a request ends whose time is too short, as its field or as the call's own deadline says."""
    if seed % 2:
        call = place.stub.Generate(request(max_tokens=ENDLESS, seed=seed, timeout_ms=round(1000 * timeout_s)))
    else:
        call = place.stub.Generate(request(max_tokens=ENDLESS, seed=seed), timeout=timeout_s)
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.parametrize("timeouts_s", STORMS.values(), ids=STORMS)
@on_a_loop
async def test_short_deadlines_harm_nobody_else(timeouts_s: list[float]):
    replica = await FakeReplica.start(step_s=0.02)
    async with site(replica) as place:
        calls = [place.stub.GenerateStream(request(max_tokens=NUM_TOKENS, seed=seed)) for seed in range(NUM_STREAMS)]
        streams = [asyncio.create_task(collected(call)) for call in calls]
        await replica.until(lambda: replica.num_tokens > NUM_STREAMS)
        storm = [expire(place, seed, timeout_s) for seed, timeout_s in enumerate(timeouts_s, NUM_STREAMS)]
        codes = await asyncio.gather(*storm)
        assert set(codes) == {"DEADLINE_EXCEEDED"}
        assert not any(stream.done() for stream in streams), "they were under way all the time"
        replica.step_s = 0.0
        for seed, stream in enumerate(streams):
            chunks = await stream
            token_ids, text = expected("hello", seed, NUM_TOKENS)
            assert [token_id for chunk in chunks for token_id in chunk.token_ids] == token_ids
            assert "".join(chunk.text for chunk in chunks) == text
        assert replica.num_links == 1
        assert all(not submit.output_token_ids for submit in replica.submits), "none had to begin again"
