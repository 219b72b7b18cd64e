"""A proxy in the environment, as companies' machines have it: nothing within a machine or a cluster goes through it."""

import asyncio

import pytest

from benchmarks.static_directory import StaticDirectory
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.client.transport import call_admin
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.server.router import Router
from holdfast.worker.errors import ReplicaError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.wire.loopback import NO_PROXY, proxy_on_the_way, reaching
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_any_loop
from tests.router.site import eventually, expected

VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "grpc_proxy")


@pytest.fixture(autouse=True)
def a_proxy_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


@on_any_loop
async def test_links_and_clients_of_this_machine_go_past_a_proxy():
    replica = await FakeReplica.start()
    router = await Router.start(
        RouterConfig(), LimitsConfig(), StaticDirectory([replica.endpoint]), load_tokenizer=byte_tokenizer
    )

    async def is_up() -> bool:
        return any(model.num_replicas for model in router._dispatch_host.dispatch.models())

    await eventually(is_up)
    async with AsyncClient(router.address) as client:
        generation = await client.generate("hello", SamplingParams(max_tokens=6, seed=1))
    assert generation.completions[0].text == expected("hello", 1, 6)[1]
    state = await asyncio.to_thread(call_admin, router.address, "DumpState", {})
    assert "hello" not in str(state)
    await router.stop()
    await replica.kill()


@pytest.mark.parametrize(
    ("address", "is_direct"),
    [
        ("127.0.0.1:50051", True),
        ("127.8.9.1:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("dns:localhost:50051", True),
        ("ipv4:127.0.0.1:50051", True),
        ("ipv6:[::1]:50051", True),
        ("10.0.0.1:50051", False),
        ("[fd00::1]:50051", False),
        ("router.example.com:443", False),
        ("localhost.example.com:443", False),
    ],
)
def test_a_client_leaves_the_way_to_other_machines_to_its_user(address, is_direct):
    assert (NO_PROXY in reaching(address, ())) == is_direct


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
@on_any_loop
async def test_a_client_that_a_proxy_keeps_from_its_router_says_so(name, monkeypatch):
    for other in VARIABLES:
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    said = f"{name} is set, so the way to 192.0.2.1:50051 is by a proxy: no_proxy"
    async with AsyncClient("192.0.2.1:50051", connect_s=0.1) as client:
        with pytest.raises(ReplicaError, match=said):
            await client.generate("hello", SamplingParams(max_tokens=1))
    with pytest.raises(ReplicaError, match=said):
        await asyncio.to_thread(call_admin, "192.0.2.1:50051", "DumpState", {})


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"http_proxy": "http://p:1"}, "http_proxy"),
        ({"http_proxy": "http://p:1", "https_proxy": "http://p:1"}, "https_proxy"),
        ({"http_proxy": "http://p:1", "no_proxy": "other.com, example.com"}, ""),
        ({"http_proxy": "http://p:1", "no_proxy": "example.com", "no_grpc_proxy": "other.com"}, "http_proxy"),
        ({"http_proxy": "p:1"}, ""),
        ({"http_proxy": "socks5://p:1", "all_proxy": "http://p:1", "HTTP_PROXY": "http://p:1"}, ""),
        ({}, ""),
    ],
)
def test_the_proxy_by_which_grpc_goes(environ, name):
    assert proxy_on_the_way("router.example.com:443", environ) == name
    assert proxy_on_the_way("localhost:443", environ) == ""
