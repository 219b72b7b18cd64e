"""Certificates that expire while they are in use: of clients' ports, of links, of a front; and what is said of it."""

import asyncio
import functools
import inspect
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import grpc
import httpx
import pytest

from benchmarks.static_directory import StaticDirectory
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.front.front import FrontOptions, start
from holdfast.cluster.front.upstream import RelaySettings
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.server.router import Router
from holdfast.v1 import inference_pb2_grpc
from holdfast.worker.config import HealthConfig
from holdfast.worker.errors import ReplicaError
from holdfast.worker.replica.link_server import LinkServer
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.wire.link_security import LINK_NAME, LinkSecurity
from holdfast.worker.wire.tls import DAY_S, NOTICE_S, Tls, expiry_warning, first_expiry
from tests.certificates import Authority, Pair
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.api.test_tls import LIST, channel_to, grpc_answers, http_answers, router_with
from tests.router.links.test_link_security import TOKEN, Listening, _links
from tests.router.site import collected, eventually, expected, request
from tests.worker.replica.link_peer import INFO

VALID_S = (2.0, 6.0, 30.0)
"""For so long a certificate that expires in a test is valid; for longer only if it expired too early. The test waits
for it: nothing stands for the clock of OpenSSL."""

EXPIRED = "certificate has expired"
METRIC = re.compile(r'^holdfast_certificate_expiry_timestamp_seconds\{use="clients"\} (\S+)$', re.MULTILINE)


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path)


async def expired(cert) -> None:
    """Returns once it has. (Dates of certificates are whole seconds, and the last one counts.)"""
    await asyncio.sleep(max(0.0, first_expiry(cert.read_bytes()) + 1.01 - time.time()))


class TooLateError(Exception):
    """A certificate had expired before a test had connected with it."""


@asynccontextmanager
async def before_expiry(authority: Authority, live: Pair, valid_s: float, *hosts: str) -> AsyncIterator[None]:
    """Puts files in place that are valid for so long, in which the block has to end."""
    authority.pair("short", *hosts, valid_s=valid_s).copy_to(live)
    error = None
    try:
        async with asyncio.timeout(valid_s + 1):
            yield
    except Exception as raised:
        error = raised
    if time.time() > first_expiry(live.cert.read_bytes()):
        raise TooLateError from error
    if error is not None:
        raise error


def with_time_to_connect(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Runs the test again, with certificates that are valid for longer, where the machine was too busy for it."""

    @functools.wraps(test)
    async def runs(**fixtures: object) -> None:
        for valid_s in VALID_S[:-1]:
            with suppress(TooLateError):
                await test(**fixtures, valid_s=valid_s)
                return
        await test(**fixtures, valid_s=VALID_S[-1])

    signature = inspect.signature(test)
    fixtures = [one for one in signature.parameters.values() if one.name != "valid_s"]
    runs.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
    return runs


# --- what is known of a certificate ---


def test_the_first_certificate_of_a_chain_to_expire_counts(authority, tmp_path):
    soon, late = authority.pair("soon", valid_s=5 * DAY_S), authority.pair("late", valid_s=90 * 365 * DAY_S)
    assert first_expiry(soon.cert.read_bytes()) == pytest.approx(time.time() + 5 * DAY_S, abs=60)
    assert first_expiry(late.cert.read_bytes()) == pytest.approx(time.time() + 90 * 365 * DAY_S, abs=60), (
        "in GeneralizedTime"
    )
    chain = tmp_path / "chain.pem"
    chain.write_bytes(b"words\n" + late.cert.read_bytes() + late.key.read_bytes() + soon.cert.read_bytes())
    assert first_expiry(chain.read_bytes()) == first_expiry(soon.cert.read_bytes())
    for bad in ("", "-----BEGIN CERTIFICATE-----\nMAAA\n-----END CERTIFICATE-----\n"):
        chain.write_text(bad)
        with pytest.raises(ValueError, match=r"certificate|cut off"):
            first_expiry(chain.read_bytes())


def test_what_is_said_of_a_certificate_that_expires():
    at = 1_800_000_000.0
    assert expiry_warning("a.crt", at, at - NOTICE_S - 1) == ""
    assert "a.crt expires in 1.5 days (2027-01-15T08:00:00+00:00)" in expiry_warning("a.crt", at, at - 1.5 * DAY_S)
    assert "a.crt has expired (2027-01-15T08:00:00+00:00)" in expiry_warning("a.crt", at, at)


# --- ports of clients, and a front before them ---


@on_a_loop
@with_time_to_connect
async def test_a_certificate_that_expires_under_load_costs_no_stream_and_is_renewed_without_a_restart(
    authority, caplog, valid_s
):
    caplog.clear()
    replica, live = await FakeReplica.start(), authority.pair("live")
    trusted = authority.tls()
    async with (
        router_with(authority.tls(live, trusts=False), replica) as router,
        channel_to(router, trusted) as channel,
        httpx.AsyncClient(
            base_url=f"https://{router.http_address}",
            verify=trusted.client_context(),
            timeout=30,
            limits=httpx.Limits(keepalive_expiry=60),  # connections outlive the certificate
        ) as http,
        AsyncClient(router.address, tls=trusted) as ours,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        async with before_expiry(authority, live, valid_s):
            streams = [asyncio.create_task(collected(stub.GenerateStream(request(seed=n)))) for n in range(4)]
            posts = [asyncio.create_task(http.post("/v1/completions", json=body(seed))) for seed in range(2)]
            held = asyncio.create_task(ours.generate("hello", SamplingParams(max_tokens=8, seed=7)))
            await replica.until(lambda: len(replica.submits) == 7)
            replica.pause()
        assert float(METRIC.search((await http.get("/metrics")).text).group(1)) == first_expiry(live.cert.read_bytes())
        assert "expires in 0.0 days" in (await http.get("/health")).json()["warnings"][0]
        with caplog.at_level(logging.WARNING):
            await expired(live.cert)
            await new_connections_fail(router, trusted)
        said = [
            record.message for record in caplog.records if re.match(r"the certificate \S+ has expired", record.message)
        ]
        assert len(said) == 1, "once"
        assert f"the certificate {live.cert} has expired" in said[0]
        assert "has expired" in (await http.get("/health")).json()["warnings"][0], "the old connection goes on"
        await check_a_front(router, authority, live)
        replica.resume()
        for number, stream in enumerate(streams):
            assert "".join(chunk.text for chunk in await stream) == expected("hello", number, 8)[1]
        for seed, post in enumerate(posts):
            assert (await post).json()["choices"][0]["text"] == expected("hello", seed, 8)[1]
        assert (await held).completions[0].text == expected("hello", 7, 8)[1]
        authority.pair("renewed").copy_to(live)
        assert await grpc_answers(router, trusted)
        assert await http_answers(router, trusted)
        assert (await http.get("/health")).text == ""
        assert (await stub.ListModels(LIST)).models, "the old connection goes on"


def body(seed: int) -> dict:
    return {"prompt": "hello", "max_tokens": 8, "seed": seed, "ignore_eos": True}


async def new_connections_fail(router: Router, trusted: Tls) -> None:
    """And each client says why."""
    async with channel_to(router, trusted) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=EXPIRED):
            await inference_pb2_grpc.InferenceStub(channel).ListModels(LIST)
    async with httpx.AsyncClient(verify=trusted.client_context()) as client:
        with pytest.raises(httpx.ConnectError, match=EXPIRED):
            await client.get(f"https://{router.http_address}/health")
    async with AsyncClient(router.address, tls=trusted, connect_s=0.1) as client:
        with pytest.raises(ReplicaError, match=EXPIRED):
            await client.list_models()


async def check_a_front(router: Router, authority: Authority, live: Pair) -> None:
    """Its own certificate is good, that of the router behind it has expired; then the other way round."""
    good = authority.pair("front")
    options = {"routers": [f"https://{router.http_address}"], "routers_tls": Tls(ca=authority.cert)}
    server, _ = await start(
        FrontOptions(**options, tls=Tls(cert=good.cert, key=good.key)), None, RelaySettings(connect_s=0.2)
    )
    url = f"https://127.0.0.1:{server.port}/v1/completions"
    async with httpx.AsyncClient(verify=authority.tls().client_context()) as client:
        answer = await client.post(url, json=body(1))
        assert answer.status_code == 503
    live.copy_to(good)
    async with httpx.AsyncClient(verify=authority.tls().client_context()) as client:
        with pytest.raises(httpx.ConnectError, match=EXPIRED):
            await client.post(url, json=body(1))
    await server.stop(1.0)


# --- clients' own certificates ---


@on_a_loop
async def test_a_client_reads_its_own_certificate_again_once_it_is_renewed(authority):
    own = authority.pair("own", is_expired=True)
    async with (
        router_with(authority.tls(authority.pair("good"))) as router,
        AsyncClient(router.address, tls=authority.tls(own), connect_s=0.1) as client,
    ):
        with pytest.raises(ReplicaError):
            await client.list_models()
        authority.pair("renewed").copy_to(own)
        assert (await client.list_models()).models


# --- links ---


@on_a_loop
@with_time_to_connect
async def test_a_link_outlives_its_certificate_and_a_new_one_is_made_once_it_is_renewed(authority, caplog, valid_s):
    pair = authority.pair("link", LINK_NAME)
    security = LinkSecurity(token=TOKEN, tls=authority.tls(pair))

    async def served(port: int = 0) -> LinkServer:
        replica = SimpleNamespace(engine=Listening(), info=INFO, health=HealthConfig(), movers=None)
        return await LinkServer.start(replica, replica_id="r0", security=security, port=port)

    server = await served()
    port = int(server.address.rpartition(":")[2])
    endpoint = ReplicaEndpoint(replica_id="r0", address=server.address, model=INFO.model, model_path="/nowhere")
    router = await Router.start(
        RouterConfig(max_reconnect_s=0.05),
        LimitsConfig(),
        StaticDirectory([endpoint]),
        load_tokenizer=byte_tokenizer,
        links=security,
    )
    try:
        (link,) = await _links(router)
        await eventually(lambda: said_of(link.is_up))
        async with before_expiry(authority, pair, valid_s, LINK_NAME):
            await server.stop()
            server = await served(port)
            await eventually(lambda: said_of(link.is_up))
        assert router._certificates.expiries() == {"links": first_expiry(pair.cert.read_bytes())}
        assert link.is_up
        await expired(pair.cert)
        assert link.is_up
        assert "has expired" in router._all_warnings()[0]
        with caplog.at_level(logging.DEBUG):
            await server.stop()
            server = await served(port)
            await eventually(lambda: said_of(link._backoff.num_failed > 2 and not link.is_up))
            assert any(EXPIRED in record.message for record in caplog.records), "the router says why"
            assert any("has expired" in record.message for record in caplog.records if record.levelno == logging.ERROR)
        authority.pair("renewed", LINK_NAME).copy_to(pair)
        await eventually(lambda: said_of(link.is_up))
        assert router._all_warnings() == ()
    finally:
        await router.stop()
        await server.stop()


async def said_of(condition: bool) -> bool:
    return condition
