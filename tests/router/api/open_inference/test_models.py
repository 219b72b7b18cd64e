"""What the Open Inference Protocol says of the server and its models, and what it counts."""

import asyncio

from holdfast.foreign import grpc_service_pb2 as pb
from tests.fakes import FakeReplica
from tests.loops import on_a_loop, on_each_loop
from tests.router.api.open_inference.messages import infer, stream, unary
from tests.router.site import eventually, refusal, site


async def is_ready(place, *name: str) -> bool:
    """The server, or a model in a version."""
    fields = dict(zip(("name", "version"), name, strict=False))
    if name:
        return (await unary(place, "ModelReady")(pb.ModelReadyRequest(**fields))).ready
    return (await unary(place, "ServerReady")(pb.ServerReadyRequest())).ready


@on_each_loop
async def test_it_is_ready_while_there_is_a_replica():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        assert (await unary(place, "ServerLive")(pb.ServerLiveRequest())).live
        assert await is_ready(place)
        names = (("fake",), ("fake", "1"), ("fake", "2"), ("other",), ("",))
        assert [await is_ready(place, *name) for name in names] == [True, True, False, False, True]
        await replica.kill()
        await eventually(lambda: has_none(place))
        assert (await unary(place, "ServerLive")(pb.ServerLiveRequest())).live


async def has_none(place) -> bool:
    return not await is_ready(place) and not await is_ready(place, "fake")


@on_each_loop
async def test_a_router_that_stops_is_not_ready():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        call = unary(place, "ModelInfer")(infer())
        await replica.until(lambda: replica.running)
        stopping = asyncio.create_task(place.router.stop(grace_s=10))
        await eventually(lambda: has_none(place))
        replica.resume()
        await call
        await stopping


@on_each_loop
async def test_metadata_and_configuration_name_the_same_tensors():
    async with site(await FakeReplica.start()) as place:
        server = await unary(place, "ServerMetadata")(pb.ServerMetadataRequest())
        assert (server.name, bool(server.version)) == ("holdfast", True)
        metadata = await unary(place, "ModelMetadata")(pb.ModelMetadataRequest(name="fake"))
        config = (await unary(place, "ModelConfig")(pb.ModelConfigRequest(name="fake"))).config
        assert (metadata.name, list(metadata.versions), config.name) == ("fake", ["1"], "fake")
        for said, configured in ((metadata.inputs, config.input), (metadata.outputs, config.output)):
            assert [item.name for item in said] == [item.name for item in configured]
            assert [list(item.shape) for item in said] == [list(item.dims) for item in configured]
        assert [item.name for item in config.input if not item.optional] == ["text_input"]
        assert config.model_transaction_policy.decoupled
        assert config.parameters["max_model_len"].string_value == "100000"
        for method, request in (("ModelMetadata", pb.ModelMetadataRequest), ("ModelConfig", pb.ModelConfigRequest)):
            assert (await refusal(unary(place, method)(request(name="other")))).code == "NOT_FOUND"
            assert (await refusal(unary(place, method)(request(name="fake", version="9")))).code == "NOT_FOUND"


@on_a_loop
async def test_requests_are_counted_by_their_ends():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        await unary(place, "ModelInfer")(infer())
        assert len([item async for item in stream(place, iter([infer(), infer(stream=True)]))]) > 2
        await refusal(unary(place, "ModelInfer")(infer("")))
        await refusal(unary(place, "ModelInfer")(infer(model_name="other")))
        cancelled = stream(place)
        await cancelled.write(infer(stream=True, sampling={"max_tokens": 10**6}))
        await cancelled.read()
        cancelled.cancel()
        await eventually(lambda: are_counted(place, success=3, fail=1, cancel=1))
        (named,) = (await unary(place, "ModelStatistics")(pb.ModelStatisticsRequest())).model_stats
        assert (named.name, named.version, named.inference_count) == ("fake", "1", 3)
        assert named.last_inference > 0
        assert named.inference_stats.success.ns > 0


async def are_counted(place, *, success: int, fail: int, cancel: int) -> bool:
    request = pb.ModelStatisticsRequest(name="fake")
    (found,) = (await unary(place, "ModelStatistics")(request)).model_stats
    counts = found.inference_stats.success.count, found.inference_stats.fail.count
    return (*counts, found.response_stats["cancelled"].cancel.count) == (success, fail, cancel)
