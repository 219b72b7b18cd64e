"""grpc.health.v1 and reflection on the router's port."""

import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from holdfast.foreign import health_pb2 as own_health_pb2
from holdfast.router.api.grpc.standard_services import OVERALL
from holdfast.router.dispatch.dispatch import Dispatch
from tests.fakes import FakeReplica
from tests.loops import on_a_loop, on_each_loop
from tests.router.site import eventually, refusal, site


@on_each_loop
async def test_health_follows_the_replicas():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        stub = health_pb2_grpc.HealthStub(place.channel)
        for service in ("", "holdfast.v1.Inference", "fake"):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == 1
        assert (await refusal(stub.Check(health_pb2.HealthCheckRequest(service="other")))).code == "NOT_FOUND"
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=service)) for service in ("fake", "fake", "other")]
        news = [aiter(watch) for watch in watches]
        assert [(await anext(stream)).status for stream in news] == [1, 1, 3]
        watches[0].cancel()
        await replica.kill()
        assert (await anext(news[1])).status == 2, "one watcher leaving must not silence the others"
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 2
        for watch in watches:
            watch.cancel()


@on_each_loop
async def test_health_says_what_is_linked_even_if_a_loss_meets_a_fault_of_ours(monkeypatch):
    replica = await FakeReplica.start()
    lose = Dispatch.replica_down

    def lose_and_fail(*args: object) -> None:
        lose(*args)
        raise ZeroDivisionError

    async with site(replica) as place:
        stub = health_pb2_grpc.HealthStub(place.channel)

        async def is_everywhere(status: int) -> bool:
            checks = [stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in (*OVERALL, "fake")]
            return {(await check).status for check in checks} == {status}

        with monkeypatch.context() as patched:
            patched.setattr(Dispatch, "replica_down", lose_and_fail)
            await replica.kill()
            await eventually(lambda: is_everywhere(2))
        again = await FakeReplica.start(port=replica.port)
        await eventually(lambda: is_everywhere(1))
        await again.kill()


@on_each_loop
async def test_a_list_has_the_state_of_every_name():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        listing = place.channel.unary_unary(
            "/grpc.health.v1.Health/List",
            own_health_pb2.HealthListRequest.SerializeToString,
            own_health_pb2.HealthListResponse.FromString,
        )

        async def is_all(status: int) -> bool:
            statuses = (await listing(own_health_pb2.HealthListRequest())).statuses
            assert set(statuses) == {*OVERALL, "fake"}
            return {item.status for item in statuses.values()} == {status}

        assert await is_all(1)
        await replica.kill()
        await eventually(lambda: is_all(2))


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@on_a_loop
async def test_reflection_names_and_describes_the_services_in_both_of_its_versions(version):
    async with site(await FakeReplica.start()) as place:
        call = place.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        ours = {
            "holdfast.v1.AdminService",
            "holdfast.v1.Inference",
            "inference.GRPCInferenceService",
            "grpc.health.v1.Health",
        }
        assert names == ours | {f"grpc.reflection.{each}.ServerReflection" for each in ("v1", "v1alpha")}
        files = {name: await described(call, name) for name in names}
        assert {service for file in files.values() for service in file} >= names
        assert "List" in files["grpc.health.v1.Health"]["grpc.health.v1.Health"]
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Thing"))
        assert (await call.read()).error_response.error_code == 5
        await call.done_writing()
        call.cancel()


async def described(call, symbol: str) -> dict[str, list[str]]:
    """The methods of each service in the file of a symbol, once the file and those that it needs are put together."""
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
    pool, (file, *others) = DescriptorPool(), (await call.read()).file_descriptor_response.file_descriptor_proto
    for data in (*reversed(others), file):
        pool.AddSerializedFile(data)
    service = pool.FindServiceByName(symbol)
    return {item.full_name: list(item.methods_by_name) for item in service.file.services_by_name.values()}
