"""Calls that end before their output does: cancelled, hung up, out of time. The replica hears of it at once."""

import grpc

from holdfast.router.config import LimitsConfig
from tests.fakes import FakeReplica
from tests.loops import on_each_loop
from tests.router.site import collected, refusal, request, site


@on_each_loop
async def test_a_cancelled_call_is_off_the_replica_within_a_step():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        call = place.stub.GenerateStream(request(max_tokens=10**6))
        await anext(aiter(call))
        (attempt,) = replica.running
        num_steps = replica.num_steps
        call.cancel()
        await replica.until(lambda: replica.aborted == [attempt])
        assert replica.num_steps - num_steps < 100, "an abort, and not the end of the sequence"
        await place.until_idle()


@on_each_loop
async def test_a_cancelled_unary_call_is_off_the_replica_too():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        call = place.stub.Generate(request(max_tokens=10**6))
        await replica.until(lambda: replica.running)
        call.cancel()
        await replica.until(lambda: replica.aborted)


@on_each_loop
async def test_a_client_that_hangs_up_is_a_cancel():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        async with grpc.aio.insecure_channel(
            place.router.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            stream = channel.unary_stream("/holdfast.v1.Inference/GenerateStream")
            await anext(aiter(stream(request(max_tokens=10**6).SerializeToString())))
        await replica.until(lambda: replica.aborted)


@on_each_loop
async def test_a_timeout_in_the_request_ends_it():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        for call in (
            place.stub.Generate(request(timeout_ms=50)),
            collected(place.stub.GenerateStream(request(timeout_ms=50))),
        ):
            refused = await refusal(call)
            assert (refused.code, refused.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
        await replica.until(lambda: len(replica.aborted) == 2)
        replica.resume()


@on_each_loop
async def test_the_calls_own_deadline_ends_it():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        refused = await refusal(place.stub.Generate(request(timeout_ms=60_000), timeout=0.5))
        assert refused.code == "DEADLINE_EXCEEDED"
        await replica.until(
            lambda: len(replica.aborted) == len(replica.submits)
        )  # on a busy machine it may be too late
        replica.resume()


@on_each_loop
async def test_a_request_without_a_timeout_has_the_servers():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica, limits=LimitsConfig(default_timeout_s=0.2)) as place:
        assert (await refusal(place.stub.Generate(request()))).code == "DEADLINE_EXCEEDED"
        await replica.until(lambda: replica.aborted)
        replica.resume()
