"""grpc.health.v1 and reflection on the router's port."""

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.doors.grpc.health import OVERALL
from tests.fakes import FakeReplica
from tests.loops import on_each_loop
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
async def test_reflection_names_the_services():
    async with site(await FakeReplica.start()) as place:
        stub = reflection_pb2_grpc.ServerReflectionStub(place.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {"holdfast.v1.Inference", "grpc.health.v1.Health"} <= names
        symbol = "holdfast.v1.Inference"
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()
        call.cancel()
