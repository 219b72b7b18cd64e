"""Clients of several routers: whoever iterates does not notice that a router was lost."""

import asyncio
from dataclasses import replace

import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.client.blocking_client import Client
from holdfast.cluster.client.codec import chunk, generate_request, resubmission
from holdfast.cluster.client.generation import Chunk
from holdfast.cluster.client.received import Received
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.doors.grpc.codec import generation_request
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import CallerError, CapacityError, ReplicaError, RequestSupersededError
from holdfast.worker.request import FinishReason, Priority
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica, Wire
from tests.router.site import Site, expected, on_a_loop, site

NUM_TOKENS = 60


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": NUM_TOKENS, "seed": 1} | changes))


async def check(chunks: list, num_tokens: int = NUM_TOKENS) -> None:
    token_ids, text = expected("hello", 1, num_tokens)
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == token_ids
    assert "".join(chunk.text for chunk in chunks) == text
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert len({chunk.request_id for chunk in chunks}) == 1


@on_a_loop
async def test_a_stream_goes_on_at_another_router():
    mine, other = await FakeReplica.start("a"), await FakeReplica.start("b")
    async with site(mine) as first, site(other) as second:
        chunks = []
        async with AsyncClient([first.router.address, second.router.address], draw=lambda: 0.0) as client:
            async for chunk in client.stream("hello", params()):
                chunks.append(chunk)
                if len(chunks) == 5:
                    await first.router.stop()
        await check(chunks)
        assert len(other.submits[0].output_token_ids) >= 5
        assert not chunks[-1].replayed_without_guarantee


@on_a_loop
async def test_a_router_that_stops_hands_its_streams_over():
    """Others have their time; a client that comes again does not wait for it to pass."""
    mine, other = await FakeReplica.start("a"), await FakeReplica.start("b")
    async with site(mine) as first, site(other) as second:
        async with AsyncClient([first.router.address, second.router.address], draw=lambda: 0.0) as client:
            asking = asyncio.create_task(whole(client, max_tokens=5000))
            await mine.until(lambda: mine.running and mine.num_tokens > 5)
            await asyncio.wait_for(first.router.stop(grace_s=600, hands_over=True), 30)
            await check(await asking, 5000)
        assert len(other.submits[0].output_token_ids) >= 5


@on_a_loop
async def test_a_router_without_others_gives_its_streams_time():
    replica = await FakeReplica.start()
    async with site(replica) as place, AsyncClient(place.router.address) as client:
        asking = asyncio.create_task(whole(client))
        await replica.until(lambda: replica.running)
        await place.router.stop(grace_s=30)
        await check(await asking)
        assert len(replica.submits) == 1


@on_a_loop
async def test_a_full_queue_is_waited_for_by_those_who_were_in_before():
    """The stream had no token yet, so it comes like a new one; but its client knows that it is not."""
    mine, other = await FakeReplica.start("a"), await FakeReplica.start("b")
    mine.pause(), other.pause()
    full, one_each = LimitsConfig(max_queued=0), RouterConfig(max_waiting_per_replica=1, max_reconnect_s=0.1)
    async with site(mine) as first, site(other, limits=full, config=one_each) as second:
        async with AsyncClient(second.router.address) as busy:
            blocking = asyncio.create_task(whole(busy))
            await other.until(lambda: other.running)
            with pytest.raises(CapacityError):
                await whole(busy)
            async with AsyncClient([first.router.address, second.router.address], draw=lambda: 0.0) as client:
                asking = asyncio.create_task(whole(client))
                await mine.until(lambda: mine.running)
                await first.router.stop()
                other.resume()
                await check(await blocking)
                await check(await asking)
        assert [submit.attempt for submit in other.submits]


@on_a_loop
async def test_a_connection_that_breaks_is_made_again():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        wire = await Wire.start(port_of(place))
        chunks = []
        async with AsyncClient(f"127.0.0.1:{wire.port}") as client:
            async for chunk in client.stream("hello", params()):
                chunks.append(chunk)
                if len(chunks) == 5:
                    await wire.cut()
        await check(chunks)
        assert len(replica.submits) == 2
        await wire.stop()


@on_a_loop
async def test_a_router_that_is_lost_before_the_first_token_is_replaced_as_well():
    """It has taken the request, so the short time for those whom nobody answers does not hold."""
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        wire = await Wire.start(port_of(place))
        async with AsyncClient(f"127.0.0.1:{wire.port}", connect_s=0) as client:
            asking = asyncio.create_task(whole(client))
            await replica.until(lambda: replica.running)
            await wire.cut()
            await replica.until(lambda: len(replica.submits) == 2)
            replica.resume()
            await check(await asking)
        await wire.stop()


@on_a_loop
async def test_the_blocking_client_survives_as_well():
    mine, other = await FakeReplica.start("a"), await FakeReplica.start("b")
    async with site(mine) as first, site(other) as second:

        def iterate() -> list:
            chunks = []
            with Client([first.router.address, second.router.address], draw=lambda: 0.0) as client:
                for chunk in client.stream("hello", params(max_tokens=400)):
                    chunks.append(chunk)
            return chunks

        iterating = asyncio.create_task(asyncio.to_thread(iterate))
        await mine.until(lambda: mine.num_tokens > 3)
        await first.router.stop()
        await check(await iterating, 400)


@on_a_loop
async def test_leaving_a_blocking_iteration_aborts_the_request():
    replica = await FakeReplica.start()
    async with site(replica) as place:

        def look_at_one() -> None:
            with Client(place.router.address) as client:
                assert next(iter(client.stream("hello", params(max_tokens=10_000)))).token_ids

        await asyncio.to_thread(look_at_one)
        await place.until_idle()
        assert replica.aborted


@on_a_loop
async def test_an_error_of_the_caller_is_not_tried_elsewhere():
    mine, other = await FakeReplica.start("a"), await FakeReplica.start("b")
    async with site(other) as second, site(mine, limits=LimitsConfig(max_request_id_length=32)) as first:
        async with AsyncClient([first.router.address, second.router.address], draw=lambda: 0.0) as client:
            with pytest.raises(CallerError):
                await whole(client, request_id="x" * 33)
        assert not other.submits


@on_a_loop
async def test_whoever_was_superseded_does_not_come_back():
    replica = await FakeReplica.start()
    async with site(replica) as place, AsyncClient(place.router.address) as client:
        older = asyncio.create_task(whole(client, request_id="same", max_tokens=10_000))
        await replica.until(lambda: replica.running)
        await whole(client, request_id="same")
        with pytest.raises(RequestSupersededError):
            await older


@on_a_loop
async def test_nobody_there_is_said_soon():
    async with AsyncClient(["127.0.0.1:1", "127.0.0.1:2"], connect_s=0.1) as client:
        with pytest.raises(ReplicaError):
            await whole(client)
        with pytest.raises(ReplicaError):
            await client.get_load()


@on_a_loop
async def test_what_is_asked_once_finds_the_router_that_is_left():
    async with site(await FakeReplica.start()) as place:
        addresses = ["127.0.0.1:1", place.router.address]
        async with AsyncClient(addresses, draw=lambda: 0.0) as client:
            assert (await client.list_models()).models[0].name == "fake"


async def whole(client: AsyncClient, request_id: str = "", **changes: object) -> list:
    return [chunk async for chunk in client.stream("hello", params(**changes), request_id=request_id)]


def port_of(place: Site) -> int:
    return int(place.router.address.rpartition(":")[2])


def test_a_submission_says_its_number_and_what_is_over():
    first = generate_request(
        "hello", params(n=2), model="", request_id="x", priority=Priority.HIGH, timeout_s=9, tenant="t", cache_salt=""
    )
    received = Received()
    for index, reason in ((0, FinishReason.LENGTH), (1, None)):
        received.take(a_chunk(sequence_index=index, finish_reason=reason))
    wish = generation_request(resubmission(first, 5.0, received))
    assert (generation_request(first).attempt, wish.attempt, wish.timeout_s) == (1, 2, 5.0)
    assert (wish.tenant, wish.priority, wish.sampling_params.n) == ("t", Priority.HIGH, 2)
    assert [progress.finish_reason for progress in wish.resume.sequences] == [FinishReason.LENGTH, None]
    assert [progress.text_length for progress in wish.resume.sequences] == [2, 2]


def a_chunk(**changes: object) -> Chunk:
    message = inference_pb2.GenerateStreamResponse(request_id="x", token_ids=[1], text="ab")
    return replace(chunk(message, params()), **changes)
