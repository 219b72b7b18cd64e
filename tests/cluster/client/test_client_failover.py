"""Clients of several routers: whoever iterates does not notice that a router was lost."""

import asyncio

import grpc
import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.client.blocking_client import Client
from holdfast.worker.errors import CallerError, RequestSupersededError
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica, Wire
from tests.loops import on_a_loop, on_any_loop, on_each_loop
from tests.router.site import Site, expected, site

NUM_TOKENS = 60


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": NUM_TOKENS, "seed": 1} | changes))


async def check(chunks: list, num_tokens: int = NUM_TOKENS) -> None:
    token_ids, text = expected("hello", 1, num_tokens)
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == token_ids
    assert "".join(chunk.text for chunk in chunks) == text
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert len({chunk.request_id for chunk in chunks}) == 1


@on_any_loop
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
async def test_another_program_on_the_port_of_a_lost_router_ends_no_stream():
    """It knows nothing of our service; to a request that no router has had, that is an error at once."""
    stranger = grpc.aio.server()
    address = f"127.0.0.1:{stranger.add_insecure_port('127.0.0.1:0')}"
    await stranger.start()
    mine, other = await FakeReplica.start("a"), await FakeReplica.start("b")
    async with site(mine) as first, site(other) as second:
        addresses, chunks = [first.router.address, address, second.router.address], []
        async with AsyncClient(addresses, draw=lambda: 0.0) as client:
            async for chunk in client.stream("hello", params()):
                chunks.append(chunk)
                if len(chunks) == 5:
                    await first.router.stop()
        await check(chunks)
        async with AsyncClient(address) as client:
            with pytest.raises(CallerError, match="Method not found"):
                await whole(client)
    await stranger.stop(None)


@on_a_loop
async def test_a_router_that_stops_hands_its_streams_over():
    """Others have their time; a client that comes again does not wait for it to pass."""
    mine, other = await FakeReplica.start("a"), await FakeReplica.start("b")
    async with site(mine) as first, site(other) as second:
        async with AsyncClient([first.router.address, second.router.address], draw=lambda: 0.0) as client:
            chunks, has_five = [], asyncio.Event()

            async def ask() -> None:
                async for chunk in client.stream("hello", params()):
                    chunks.append(chunk)
                    if sum(len(chunk.token_ids) for chunk in chunks) >= 5:
                        has_five.set()

            asking = asyncio.create_task(ask())
            await mine.until(lambda: mine.running and mine.num_tokens > 5)
            mine.pause()
            await has_five.wait()
            await asyncio.wait_for(first.router.stop(grace_s=600, hands_over=True), 30)
            await asking
            await check(chunks)
        assert len(other.submits[0].output_token_ids) >= 5


@on_any_loop
async def test_a_router_without_others_gives_its_streams_time():
    replica = await FakeReplica.start()
    async with site(replica) as place, AsyncClient(place.router.address) as client:
        asking = asyncio.create_task(whole(client))
        await replica.until(lambda: replica.running)
        await place.router.stop(grace_s=30)
        await check(await asking)
        assert len(replica.submits) == 1


@on_each_loop
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


@on_each_loop
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


@on_any_loop
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


@on_any_loop
async def test_leaving_a_blocking_iteration_aborts_the_request():
    replica = await FakeReplica.start()
    async with site(replica) as place:

        def look_at_one() -> None:
            with Client(place.router.address) as client:
                assert next(iter(client.stream("hello", params(max_tokens=10_000)))).token_ids

        await asyncio.to_thread(look_at_one)
        await place.until_idle()
        assert replica.aborted


@on_any_loop
async def test_whoever_was_superseded_does_not_come_back():
    replica = await FakeReplica.start()
    async with site(replica) as place, AsyncClient(place.router.address) as client:
        older = asyncio.create_task(whole(client, request_id="same", max_tokens=10_000))
        await replica.until(lambda: replica.running)
        await whole(client, request_id="same")
        with pytest.raises(RequestSupersededError):
            await older


async def whole(client: AsyncClient, request_id: str = "", **changes: object) -> list:
    return [chunk async for chunk in client.stream("hello", params(**changes), request_id=request_id)]


def port_of(place: Site) -> int:
    return int(place.router.address.rpartition(":")[2])
