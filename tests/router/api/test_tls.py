"""TLS at the APIs of a router: with openssl's, the standard library's and gRPC's own clients; bad certificates;
clients' certificates; files that are replaced while streams run.
"""

import asyncio
import logging
import shutil
import ssl
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest

from benchmarks.static_directory import StaticDirectory
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.server.router import Router
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from holdfast.worker.errors import ConfigurationError, ReplicaError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.wire.tls import ServerTls, Tls
from tests.certificates import Authority
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop, on_each_loop
from tests.programs import outcome
from tests.router.site import collected, eventually, expected, request

LIST = inference_pb2.ListModelsRequest()


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def good(authority):
    return authority.pair("good")


@asynccontextmanager
async def router_with(tls: Tls, replica: FakeReplica | None = None):
    replica = replica or await FakeReplica.start()
    router = await Router.start(
        RouterConfig(),
        LimitsConfig(),
        StaticDirectory([replica.endpoint]),
        load_tokenizer=byte_tokenizer,
        http_port=0,
        tls=ServerTls(tls),
    )
    try:
        await eventually(lambda: _is_up(router))
        yield router
    finally:
        await router.stop()
        await replica.kill()


async def _is_up(router: Router) -> bool:
    return any(model.num_replicas for model in router._dispatch_host.dispatch.models())


def channel_to(router: Router, tls: Tls) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    return grpc.aio.secure_channel(router.address, tls.channel_credentials(), options=options)


async def grpc_answers(router: Router, tls: Tls) -> bool:
    """Whether gRPC's own client gets an answer."""
    async with channel_to(router, tls) as channel:
        try:
            return bool((await inference_pb2_grpc.InferenceStub(channel).ListModels(LIST)).models)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


async def http_answers(router: Router, tls: Tls) -> bool:
    """Whether the standard library's TLS gets an answer."""
    async with httpx.AsyncClient(verify=tls.client_context()) as client:
        try:
            return (await client.get(f"https://{router.http_address}/health")).status_code == 200
        except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
            return False


async def openssl(address: str, authority: Authority, *more: str) -> tuple[int, str]:
    """The verdict of `openssl s_client`: its exit code, and what it says."""
    arguments = ["s_client", "-connect", address, "-CAfile", str(authority.cert), "-verify_return_error", *more]
    ended = await outcome("openssl", *arguments)
    return ended.returncode, ended.stdout + ended.stderr


@on_each_loop
async def test_stock_clients_of_both_protocols_trust_a_good_certificate(authority, good):
    async with router_with(authority.tls(good, trusts=False)) as router:
        assert await grpc_answers(router, authority.tls())
        assert await http_answers(router, authority.tls())
        with pytest.raises(httpx.HTTPError):  # without TLS nobody is understood
            async with httpx.AsyncClient() as client:
                await client.get(f"http://{router.http_address}/health")
        async with grpc.aio.insecure_channel(router.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await inference_pb2_grpc.InferenceStub(channel).ListModels(LIST)


@on_a_loop
async def test_expired_self_signed_and_wrong_name_certificates_are_refused(authority):
    bad = (
        authority.pair("expired", is_expired=True),
        authority.pair("alone", signs_itself=True),
        authority.pair("elsewhere", "example.org"),
    )
    for pair in bad:
        async with router_with(authority.tls(pair, trusts=False)) as router:
            assert not await grpc_answers(router, authority.tls()), pair
            assert not await http_answers(router, authority.tls()), pair


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
@on_a_loop
async def test_openssl_agrees(authority, good):
    async with router_with(authority.tls(good, trusts=False)) as router:
        for address in (router.address, router.http_address):
            code, said = await openssl(address, authority, "-verify_ip", "127.0.0.1", "-alpn", "h2")
            assert (code, "Verify return code: 0 (ok)" in said) == (0, True), said
            code, said = await openssl(address, authority, "-verify_hostname", "example.org")
            assert (code != 0, "hostname mismatch" in said) == (True, True), said
            for old in ("-tls1_1", "-tls1"):
                code, said = await openssl(address, authority, old)
                assert code != 0, said
    for pair, reason in (
        (authority.pair("expired", is_expired=True), "certificate has expired"),
        (authority.pair("alone", signs_itself=True), "self-signed certificate"),
    ):
        async with router_with(authority.tls(pair, trusts=False)) as router:
            for address in (router.address, router.http_address):
                code, said = await openssl(address, authority)
                assert (code != 0, reason in said) == (True, True), said


@on_each_loop
async def test_mutual_tls_lets_in_whose_certificate_the_authority_has_signed(authority, good, tmp_path):
    stranger = Authority(tmp_path, "stranger")
    client = authority.pair("client")
    theirs = stranger.pair("theirs")
    async with router_with(authority.tls(good)) as router:
        assert await grpc_answers(router, authority.tls(client))
        assert await http_answers(router, authority.tls(client))
        for bad in (authority.tls(), Tls(ca=authority.cert, cert=theirs.cert, key=theirs.key)):
            assert not await grpc_answers(router, bad)
            assert not await http_answers(router, bad)


@on_each_loop
async def test_certificates_are_exchanged_while_streams_run_and_none_is_dropped(authority, good, tmp_path):
    """Three times, between two authorities: what was open goes on, and new connections meet the new certificate."""
    other = Authority(tmp_path, "other")
    live, first, second = authority.pair("live"), authority.pair("first"), other.pair("second")
    replica = await FakeReplica.start()
    async with (
        router_with(authority.tls(live, trusts=False), replica) as router,
        channel_to(router, authority.tls()) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        http = httpx.AsyncClient(verify=authority.tls().client_context(), timeout=30)
        streams = [asyncio.create_task(collected(stub.GenerateStream(request(seed=n)))) for n in range(8)]
        body = {"prompt": "hello", "max_tokens": 300, "seed": 1, "ignore_eos": True}
        url = f"https://{router.http_address}/v1/completions"
        posts = [asyncio.create_task(http.post(url, json=body)) for _ in range(4)]
        await replica.until(lambda: len(replica.submits) == 12)
        replica.pause()
        for pair, by in ((second, other), (first, authority), (second, other)):
            pair.copy_to(live)
            assert await grpc_answers(router, by.tls())
            assert await http_answers(router, by.tls())
            strangers = other if by is authority else authority
            assert not await grpc_answers(router, strangers.tls())
            assert not await http_answers(router, strangers.tls())
        replica.resume()
        for number, stream in enumerate(streams):
            text = "".join(chunk.text for chunk in await stream)
            assert text == expected("hello", number, 8)[1]
        for post in posts:
            assert (await post).json()["choices"][0]["text"] == expected("hello", 1, 300)[1]
        await http.aclose()


@on_a_loop
async def test_the_authority_of_clients_is_exchanged_too(authority, good, tmp_path):
    other, trusted = Authority(tmp_path, "other"), tmp_path / "trusted.pem"
    trusted.write_bytes(authority.cert.read_bytes())
    server = Tls(ca=trusted, cert=good.cert, key=good.key)
    old, new = authority.pair("old"), other.pair("new")
    mine, theirs = (Tls(ca=authority.cert, cert=pair.cert, key=pair.key) for pair in (old, new))
    async with router_with(server) as router:
        for answers in (grpc_answers, http_answers):
            assert await answers(router, mine)
            assert not await answers(router, theirs)
        trusted.write_bytes(other.cert.read_bytes())
        for answers in (grpc_answers, http_answers):
            assert await answers(router, theirs)
            assert not await answers(router, mine)


@on_a_loop
async def test_half_a_rotation_leaves_the_old_certificate(authority, tmp_path, caplog):
    live, other = authority.pair("half"), authority.pair("whole")
    async with router_with(authority.tls(live, trusts=False)) as router:
        live.key.write_bytes(other.key.read_bytes())
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                assert await grpc_answers(router, authority.tls())
                assert await http_answers(router, authority.tls())
        assert sum("stays as it was" in record.message for record in caplog.records) == 1
        other.copy_to(live)
        assert await http_answers(router, authority.tls())


@on_a_loop
async def test_our_client_speaks_tls(authority, good):
    async with router_with(authority.tls(good)) as router:
        async with AsyncClient(router.address, tls=authority.tls(authority.pair("ours"))) as client:
            params = SamplingParams(max_tokens=4, seed=1)
            assert (await client.generate("hello", params)).completions[0].text == expected("hello", 1, 4)[1]
        async with AsyncClient(router.address, tls=authority.tls(), connect_s=0.1) as client:
            with pytest.raises(ReplicaError):
                await client.list_models()


def test_files_that_cannot_be_used_are_refused_by_name(authority, good, tmp_path):
    other = authority.pair("another")
    (tmp_path / "garbage").write_text("no PEM")
    for tls in (
        Tls(cert=good.cert, key=other.key),
        Tls(cert=good.cert, key=tmp_path / "missing"),
        Tls(cert=tmp_path / "garbage", key=good.key),
        Tls(cert=good.cert, key=good.key, ca=tmp_path / "garbage"),
        Tls(),
    ):
        with pytest.raises(ConfigurationError, match=r"tls: cert = ") as refused:
            ServerTls(tls)
        assert "PRIVATE KEY" not in str(refused.value)
    with pytest.raises(ValueError, match="must be set together"):
        Tls(cert=good.cert)
    with pytest.raises(ConfigurationError, match="garbage"):
        Tls(ca=tmp_path / "garbage").client_context()
    assert isinstance(Tls().client_context(), ssl.SSLContext)
