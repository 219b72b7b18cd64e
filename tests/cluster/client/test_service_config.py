"""The published service config, with gRPC's own client against two routers."""

import asyncio

import grpc

from holdfast import SERVICE_CONFIG
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.v1 import inference_pb2_grpc
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.site import collected, eventually, expected, request, site


def channel_to(*places) -> grpc.aio.Channel:
    target = "ipv4:" + ",".join(place.router.address for place in places)
    options = [("grpc.service_config", SERVICE_CONFIG), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(target, options=options)


@on_a_loop
async def test_calls_go_round_the_routers_that_can_serve():
    mine, other = await FakeReplica.start("a"), await FakeReplica.start("b")
    config = RouterConfig(replica_wait_s=0, max_reconnect_s=0.1)  # who asks just then is sent on, and does not wait
    async with (
        site(mine, config=config) as first,
        site(other, config=config) as second,
        channel_to(first, second) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def shares(num_calls: int = 20) -> list[int]:
            before = [len(replica.submits) for replica in (mine, other)]
            for _ in range(num_calls):
                await stub.Generate(request(max_tokens=1))
            return [len(replica.submits) - count for replica, count in zip((mine, other), before, strict=True)]

        async def both_are_used() -> bool:
            return all(await shares(2))

        async def first_is_left() -> bool:
            return await shares(2) == [0, 2]

        await eventually(both_are_used)
        assert await shares() == [10, 10]
        await mine.kill()
        await eventually(first_is_left)
        assert await shares() == [0, 20]
        await first.router.stop()
        assert await shares() == [0, 20], "nobody was sent to the router that stopped"


@on_a_loop
async def test_a_router_that_is_full_is_asked_again_when_it_says():
    replica = await FakeReplica.start()
    replica.pause()
    config, limits = RouterConfig(max_waiting_per_replica=1, max_reconnect_s=0.1), LimitsConfig(max_queued=0)
    async with site(replica, config=config, limits=limits) as place, channel_to(place) as channel:
        first = place.stub.Generate(request())
        await replica.until(lambda: replica.running)
        second = asyncio.ensure_future(collected(inference_pb2_grpc.InferenceStub(channel).GenerateStream(request())))
        replica.resume()
        await first
        assert "".join(chunk.text for chunk in await second) == expected("hello", 1, 8)[1]


@on_a_loop
async def test_calls_beyond_a_connections_limit_are_made_later():
    """gRPC's client runs into the limit where a call ends and another begins; what was refused has not begun."""
    replica = await FakeReplica.start()
    replica.pause()
    config = RouterConfig(max_concurrent_streams=3, max_reconnect_s=0.1)  # one of them is the health watch
    async with site(replica, config=config) as place, channel_to(place) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [asyncio.ensure_future(collected(stub.GenerateStream(request(seed=n)))) for n in range(4)]
        await replica.until(lambda: len(replica.running) == 2)
        assert place.router.num_open == 2
        replica.resume()
        for seed, chunks in enumerate(await asyncio.gather(*calls)):
            assert "".join(chunk.text for chunk in chunks) == expected("hello", seed, 8)[1]
