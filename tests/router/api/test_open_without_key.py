"""What is open without a key, over both protocols: of everything that is served, exactly what is documented."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
from google.protobuf.descriptor import MethodDescriptor
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from holdfast.foreign import health_pb2
from holdfast.router.api.grpc import admin, channelz, endpoint_picker, server
from holdfast.router.api.grpc import standard_services as health
from holdfast.router.api.http.page_files import PAGE
from holdfast.router.api.open_inference import servicer as open_inference
from holdfast.router.config import RouterConfig
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.test_keys_by_api import OPERATOR, locked
from tests.router.security.test_gate import key_of, secret_of
from tests.router.site import eventually, site, with_key

OPEN_METHODS = {
    *(f"/grpc.health.v1.Health/{method.name}" for method in health_pb2.DESCRIPTOR.services_by_name["Health"].methods),
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
    "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
}
OPEN_PATHS = {"/health", "/ready", "/ping", *PAGE}
OF_OPERATORS = (admin.SERVICE, channelz.SERVICE)
SERVICES = (admin.SERVICE, server.SERVICE, open_inference.SERVICE, health.SERVICE, endpoint_picker.SERVICE)
REFLECTION = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")

CONFIG = RouterConfig(endpoint_picker=True, max_reconnect_s=0.1)


async def named_services(channel: grpc.aio.Channel, key: str) -> set[str]:
    """What reflection says is served, which must be what is registered: no service hides from this test."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = await anext(aiter(stub.ServerReflectionInfo(iter([listing]), metadata=with_key(key))))
    return {service.name for service in answer.list_services_response.service}


async def status_of(channel: grpc.aio.Channel, method: MethodDescriptor, key: str) -> grpc.StatusCode:
    """The status of a call with an empty message; OK as soon as anything is answered."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    metadata, timeout = with_key(key), 10
    try:
        if method.client_streaming:
            await anext(aiter(channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=timeout)), None)
        elif method.server_streaming:
            await anext(aiter(channel.unary_stream(path)(b"", metadata=metadata, timeout=timeout)), None)
        else:
            await channel.unary_unary(path)(b"", metadata=metadata, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def refused(channel: grpc.aio.Channel, services, key: str, status: grpc.StatusCode) -> AsyncIterator[str]:
    """The methods that answer with this status. grpc.aio may lose a status that comes while it still writes."""
    for service in services:
        for method in service.methods:
            found = await status_of(channel, method, key)
            for _ in range(5):
                if found is not grpc.StatusCode.INTERNAL:
                    break
                found = await status_of(channel, method, key)
            if found is status:
                yield f"/{service.full_name}/{method.name}"


def all_methods(services) -> set[str]:
    return {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}


@on_a_loop
async def test_every_grpc_method_asks_for_a_key_but_those_that_are_documented():
    replica = await FakeReplica.start()
    replica.pause()
    async with (
        site(replica, config=CONFIG, admin_port=0, **locked(key_of("a"), max_timeout_s=5)) as place,
        grpc.aio.insecure_channel(place.router.admin_address) as admin_channel,
    ):
        ports = {place.channel: SERVICES, admin_channel: (channelz.SERVICE, health.SERVICE)}
        for channel, services in ports.items():
            names = {service.full_name for service in services}
            assert await named_services(channel, OPERATOR) == names | set(REFLECTION)
            for bad in ("", secret_of("a")[:-1], secret_of("nobody")):
                found = {path async for path in refused(channel, services, bad, grpc.StatusCode.UNAUTHENTICATED)}
                assert found == all_methods(services) - OPEN_METHODS
            for name in REFLECTION:
                call = channel.stream_stream(f"/{name}/ServerReflectionInfo")(iter([b""]))
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            denied = {
                path async for path in refused(channel, services, secret_of("a"), grpc.StatusCode.PERMISSION_DENIED)
            }
            operators = all_methods([one for one in services if one in OF_OPERATORS])
            if server.SERVICE in services:
                operators.add("/holdfast.v1.Inference/GetLoad")
            assert denied == operators
        replica.resume()

        async def idle() -> bool:
            return replica.is_idle

        await eventually(idle)


@on_a_loop
async def test_every_http_route_asks_for_a_key_but_those_that_are_documented():
    async with (
        site(await FakeReplica.start(), http=True, **locked(key_of("a"))) as place,
        httpx.AsyncClient(base_url=f"http://{place.router.http_address}") as client,
    ):
        routes = [(method, route.path) for route in place.router._http_api.app().routes for method in route.methods]
        assert len(routes) > 25
        for method, path in routes:
            named = re.sub(r"\{[^}]*\}", "x", path)
            answer = await client.request(method, named, **({"json": {}} if method == "POST" else {}))
            assert answer.status_code == (200 if path in OPEN_PATHS else 401), (method, path)
        paths = {path for _, path in routes}
        for path in paths:
            served = {method for method, other in routes if other == path}
            for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} - served:
                answer = await client.request(method, re.sub(r"\{[^}]*\}", "x", path))
                assert answer.status_code in (401, 404, 405), (method, path)


def test_what_is_open_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    message = page.split("**Open to everyone**")[1].split("\n\n")[0]
    for method in OPEN_METHODS:
        service, name = method.strip("/").split("/")
        assert name in message or service.rpartition(".")[0] in message or "ext_proc" in service, method
    for path in OPEN_PATHS - set(PAGE):
        assert f"`{path}`" in message
