"""Our clients with API keys and over TLS: blocking, asynchronous, a transport of others' clients, the command line."""

import threading
from contextlib import contextmanager

import httpx
import pytest

from benchmarks.static_directory import StaticDirectory
from holdfast import AsyncClient, Client, HoldingTransport
from holdfast.cluster.commands.cli import run
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.security.gate import UNKNOWN, Gate
from holdfast.router.server.router import Router
from holdfast.worker.errors import AuthenticationError, PermissionDeniedError, RateLimitError
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.wire.tls import ServerTls, Tls
from tests import loops
from tests.certificates import Authority
from tests.fakes import FakeReplica, byte_tokenizer
from tests.router.security.test_gate import Keys, key_of, secret_of
from tests.router.site import eventually, expected

PARAMS = SamplingParams(max_tokens=6, seed=1)
EXPECTED = expected("hello", 1, 6)[1]


@contextmanager
def served(tls: ServerTls):
    """A router on a thread of its own, which asks for keys over TLS: its gRPC and HTTP addresses."""
    found, ready, over = [], threading.Event(), threading.Event()
    keys = Keys(key_of("a"), key_of("op", operator=True), key_of("slow", requests_per_minute=6))

    async def serve() -> None:
        import asyncio

        replica = await FakeReplica.start()
        router = await Router.start(
            RouterConfig(),
            LimitsConfig(),
            StaticDirectory([replica.endpoint]),
            load_tokenizer=byte_tokenizer,
            http_port=0,
            gate=Gate(keys),
            tls=tls,
        )

        async def is_up() -> bool:
            return any(model.num_replicas for model in router._dispatch_host.dispatch.models())

        await eventually(is_up)
        found.extend((router.address, router.http_address))
        ready.set()
        await asyncio.to_thread(over.wait)
        await router.stop()
        await replica.kill()

    thread = threading.Thread(target=lambda: loops.run(serve(), timeout_s=None))
    thread.start()
    try:
        assert ready.wait(30)
        yield found
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    authority = Authority(folder)
    with served(ServerTls(authority.tls(authority.pair("good"), trusts=False))) as (address, http_address):
        yield address, http_address, authority


def test_a_blocking_client_says_its_key_over_tls(place):
    address, _, authority = place
    with Client(address, api_key=secret_of("a"), tls=authority.tls()) as client:
        assert client.generate("hello", PARAMS).completions[0].text == EXPECTED
        assert "".join(chunk.text for chunk in client.stream("hello", PARAMS)) == EXPECTED
        with pytest.raises(PermissionDeniedError, match="normal at most"):
            client.generate("hello", PARAMS, priority=Priority.CRITICAL)
    with Client(address, tls=authority.tls()) as client, pytest.raises(AuthenticationError, match=UNKNOWN):
        client.generate("hello", PARAMS)


def test_a_rate_that_is_used_up_is_raised_and_not_retried(place):
    address, _, authority = place
    with Client(address, api_key=secret_of("slow"), tls=authority.tls()) as client:
        client.generate("hello", PARAMS)
        with pytest.raises(RateLimitError) as refused:
            client.generate("hello", PARAMS)
        assert refused.value.retry_after_s > 1


def test_an_asynchronous_client_does_the_same(place):
    address, _, authority = place

    async def ask() -> None:
        async with AsyncClient(address, api_key=secret_of("a"), tls=authority.tls()) as client:
            assert (await client.generate("hello", PARAMS)).completions[0].text == EXPECTED
            assert len((await client.list_models()).models) == 1
            with pytest.raises(PermissionDeniedError, match="not an operator"):
                await client.get_load()

    loops.run(ask())


def test_a_transport_of_others_clients_says_the_key_that_they_do_not(place):
    _, http_address, authority = place
    body = {"prompt": "hello", "max_tokens": 6, "seed": 1}
    url = f"https://{http_address}"
    own = {"tls": authority.tls(), "draw": lambda: 0.0}
    with httpx.Client(transport=HoldingTransport([url], api_key=secret_of("a"), **own), base_url=url) as client:
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == EXPECTED
        refused = client.post("/v1/completions", json=body, headers={"authorization": "Bearer another"})
        assert refused.status_code == 401
    with httpx.Client(transport=HoldingTransport([url], **own), base_url=url) as client:
        assert client.post("/v1/completions", json=body).status_code == 401


def test_the_command_line_takes_the_key_from_the_environment(place, monkeypatch, capsys):
    address, _, authority = place
    arguments = ["generate", "hello", "--server", address, "--max-tokens", "6", "--seed", "1"]
    with_ca = [*arguments, "--server-ca", str(authority.cert)]
    assert run(with_ca) == 2
    assert UNKNOWN in capsys.readouterr().err
    monkeypatch.setenv("HOLDFAST_API_KEY", secret_of("a"))
    assert run(with_ca) == 0
    assert EXPECTED in capsys.readouterr().out
    assert run(["stats", "--server", address, "--server-ca", str(authority.cert)]) == 2
    monkeypatch.setenv("HOLDFAST_CLIENT__API_KEY", secret_of("op"))
    assert run(["stats", "--server", address, "--server-ca", str(authority.cert)]) == 0
    assert run([*arguments, "--server-ca", "/nowhere.pem"]) == 2
    assert "/nowhere.pem" in capsys.readouterr().err


def test_half_a_certificate_is_refused():
    with pytest.raises(ValueError, match="must be set together"):
        Client("localhost:1", tls=Tls(cert="only-this"))
