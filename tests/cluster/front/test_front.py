"""The front before two routers whose connections are cut: stock clients of every API see nothing of it."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx2
import openai
import pytest

from holdfast.cluster.front import front as fronts
from holdfast.cluster.front.front import METRICS, Front, FrontOptions, start
from holdfast.cluster.front.relay import MAX_WHOLE_BYTES
from holdfast.cluster.front.upstream import RelaySettings
from holdfast.router.config import LimitsConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.wire.tls import Tls
from tests.certificates import Authority
from tests.cluster.client.test_held_streams import APIS
from tests.cluster.client.test_holding_transport import read_and_refuse
from tests.cluster.client.two_routers import NUM_TOKENS, Two, come_back, is_idle, two_routers
from tests.loops import on_a_loop
from tests.router.api.http.test_openai_sdk import HELLO, RENDERED, text_of
from tests.router.api.test_tls import router_with
from tests.router.site import eventually


@asynccontextmanager
async def fronted(
    place: Two, limits: LimitsConfig | None = None, settings: RelaySettings | None = None
) -> AsyncIterator[tuple[SimpleNamespace, Front]]:
    """What stands for a place where clients are concerned, and the front itself."""
    server, front = await start(FrontOptions(routers=place.addresses), limits, settings)
    try:
        yield SimpleNamespace(addresses=[f"127.0.0.1:{server.port}"]), front
        await eventually(lambda: _is_idle(front))
    finally:
        await server.stop(1.0)


async def _is_idle(front: Front) -> bool:
    return not front.stats.num_open


def plain() -> httpx2.AsyncHTTPTransport:
    return httpx2.AsyncHTTPTransport(verify=False)


def stock(at: SimpleNamespace, **options) -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(transport=plain())
    options = {"api_key": "x", "max_retries": 0, "http_client": http} | options
    return openai.AsyncOpenAI(base_url=f"http://{at.addresses[0]}/v1", **options)


@pytest.mark.in_turn
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.__name__)
@on_a_loop
async def test_a_stream_of_a_stock_client_that_is_cut_anywhere_goes_on(api, part):
    async with two_routers() as place, fronted(place) as (at, front):
        whole = await api(at, plain())
        assert whole[0] == APIS[api]
        frames = range(part, NUM_TOKENS, 3)
        cuts = [(num_marks, num_bytes) for num_marks in frames for num_bytes in (0, 1 + 37 * num_marks)]
        for cut in cuts:
            place.cut(cut)
            assert await api(at, plain()) == whole, cut
        place.cut(*[(1, 3)] * 30)
        assert await api(at, plain()) == whole
        assert place.num_cut >= len(cuts) // 2
        assert front.stats.num_routers_lost >= place.num_cut // 2  # what is cut after its end is not lost
        assert front.stats.num_resumed


@on_a_loop
async def test_an_answer_in_one_piece_is_asked_for_again_and_errors_are_as_without_it():
    async with two_routers() as place, fronted(place) as (at, front), stock(at) as client:
        whole = asyncio.create_task(client.chat.completions.create(model="fake", messages=HELLO, seed=6, max_tokens=60))
        await eventually(lambda: _has_one_open(place))
        busy = [router.num_open > 0 for router in place.routers].index(True)
        stopping = asyncio.create_task(place.routers[busy].stop(hands_over=True))
        assert (await whole).choices[0].message.content == text_of(RENDERED, 6, 60)
        assert front.stats.num_repeated >= 1
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="fake", messages=HELLO, temperature=-1, stream=True)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=HELLO)
        assert [model.id async for model in client.models.list()] == ["fake"]
        await stopping


async def _has_one_open(place: Two) -> bool:
    return any(router.num_open for router in place.routers)


@on_a_loop
async def test_the_routers_may_all_be_away_for_a_while():
    async with two_routers() as place, fronted(place) as (at, _), stock(at) as client:
        place.cut((3, 0))
        stream = await client.chat.completions.create(
            model="fake", messages=HELLO, seed=5, max_tokens=NUM_TOKENS, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if len(text) == 2:
                place.cutters[0].refuses = place.cutters[1].refuses = True
                asyncio.get_running_loop().call_later(0.2, come_back, place)
    assert text == text_of(RENDERED, 5, NUM_TOKENS)


@on_a_loop
async def test_it_gives_up_after_its_time_in_the_clients_words():
    async with (
        two_routers() as place,
        fronted(place, None, RelaySettings(connect_s=0.1, reconnect_s=0.3)) as (at, front),
    ):
        for cutter in place.cutters:
            cutter.refuses = True
        async with stock(at) as client:
            with pytest.raises(openai.InternalServerError, match="no router"):
                await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=3)
            come_back(place)
            place.cut((2, 0))
            stream = await client.chat.completions.create(
                model="fake", messages=HELLO, seed=5, max_tokens=NUM_TOKENS, stream=True
            )
            with pytest.raises(openai.APIError, match="no router answers"):
                await read_and_refuse(place, stream)
            come_back(place)
        assert front.stats.num_given_up == 2


@on_a_loop
async def test_a_client_that_leaves_ends_its_request_and_one_that_reads_nothing_stops_it():
    async with two_routers() as place, fronted(place) as (at, front):
        async with stock(at) as client:
            stream = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=100_000, stream=True)
            async for _ in stream:
                break
            await stream.close()
            await eventually(lambda: is_idle(place.routers))
        host, port = at.addresses[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**10)
        body = json.dumps(
            {"model": "fake", "prompt": "x" * 50_000, "echo": True, "max_tokens": 100_000, "stream": True}
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {at.addresses[0]}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body.encode())
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        await eventually(lambda: is_idle(place.routers))
        assert front.stats.num_held_bytes == 0


@on_a_loop
async def test_who_is_forwarded_is_no_caller_of_the_routers_machine():
    """Without keys, orders are for callers of the machine alone; the front makes nobody one."""
    async with two_routers() as place, fronted(place) as (at, _), httpx2.AsyncClient(transport=plain()) as http:
        order = {"level": "INFO"}
        direct = await http.post(f"http://{place.routers[0].http_address}/admin/log-level", json=order)
        assert direct.status_code == 200
        for headers in ({}, {"x-forwarded-for": "127.0.0.1"}, {"X-Forwarded-For": ""}):
            answer = await http.post(f"http://{at.addresses[0]}/admin/log-level", json=order, headers=headers)
            assert answer.status_code == 403, answer.text
            assert "sent on" in answer.text


@on_a_loop
async def test_a_client_that_holds_by_itself_is_handed_on():
    async with two_routers() as place, fronted(place) as (at, front):
        transport = place.transport()
        transport.origins = [type(transport.origins[0]).of(at.addresses[0])]
        async with openai.AsyncOpenAI(
            base_url=f"http://{at.addresses[0]}/v1",
            api_key="x",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=transport),
        ) as client:
            place.cut((3, 5))
            stream = await client.chat.completions.create(
                model="fake", messages=HELLO, seed=5, max_tokens=NUM_TOKENS, stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == text_of(RENDERED, 5, NUM_TOKENS)
        assert front.stats.num_resumed == 0
        assert place.num_cut == 1


@on_a_loop
async def test_headers_that_are_the_fronts_own_are_not_taken_from_clients():
    async with two_routers() as place, fronted(place) as (at, _), httpx2.AsyncClient(transport=plain()) as http:
        body = {"model": "fake", "prompt": "hello", "seed": 5, "max_tokens": NUM_TOKENS, "stream": True}
        headers = {"x-holdfast-routers-lost": "999999", "x-holdfast-resume": "5", "x-request-id": "mine"}
        answer = await http.post(f"http://{at.addresses[0]}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert ": held" not in answer.text
        assert "x-holdfast-hold" not in answer.headers
        assert answer.headers["x-request-id"] == "mine"
        assert answer.text.endswith("data: [DONE]\n\n")


@on_a_loop
async def test_bodies_are_bounded_and_counted(monkeypatch):
    async with two_routers() as place:
        limits = LimitsConfig(max_message_bytes=2**20)
        async with fronted(place, limits) as (at, front), httpx2.AsyncClient(transport=plain()) as http:
            url = f"http://{at.addresses[0]}/tokenize"
            large, small = {"prompt": "x" * 100_000}, {"prompt": "x"}
            assert (await http.post(url, json={"prompt": "x" * 2**20})).status_code == 400
            assert (await http.post(url, json=large)).status_code == 200
            monkeypatch.setattr(fronts, "MAX_HELD_BYTES", -1)
            refused = await http.post(url, json=large)
            assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
            assert (await http.post(url, json=small)).status_code == 200
            message = (await http.get(f"http://{at.addresses[0]}{METRICS}")).text
            assert "holdfast_front_requests_total 2\n" in message
            assert "holdfast_front_held_bytes 0\n" in message
            forwarded = await http.get(f"http://{at.addresses[0]}{METRICS}", headers={"x-forwarded-for": "::1"})
            assert forwarded.status_code == 403
            assert front.stats.num_held_bytes == 0


async def server_of(answer: bytes) -> asyncio.Server:
    """One of others, that answers everything with this and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


@pytest.mark.parametrize("size", [10, 3 * MAX_WHOLE_BYTES])
@on_a_loop
async def test_an_answer_may_be_longer_than_what_is_kept(size):
    body = b"x" * size
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % size
    other = await server_of(head + body)
    address = f"127.0.0.1:{other.sockets[0].getsockname()[1]}"
    server, _ = await start(FrontOptions(routers=[address]))
    async with httpx2.AsyncClient(transport=plain()) as http:
        answer = await http.get(f"http://127.0.0.1:{server.port}/x")
        assert (answer.status_code, len(answer.content)) == (200, size)
        whole = await http.head(f"http://127.0.0.1:{server.port}/x")
        assert whole.headers["content-length"] == str(size)
    await server.stop(1.0)
    other.close()


@pytest.mark.parametrize(
    "junk", [b"", b"HTTP/1.1 200 OK\r\n", b"junk\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2**17]
)
@on_a_loop
async def test_what_is_no_answer_is_a_loss(junk):
    other = await server_of(junk)
    address = f"127.0.0.1:{other.sockets[0].getsockname()[1]}"
    server, front = await start(FrontOptions(routers=[address]), None, RelaySettings(connect_s=0.2, reconnect_s=0.2))
    async with httpx2.AsyncClient(transport=plain()) as http:
        answer = await http.get(f"http://127.0.0.1:{server.port}/x")
        assert answer.status_code == 503
    assert front.stats.num_routers_lost >= 1
    await server.stop(1.0)
    other.close()


EVENT = b"data: " + b"x" * 1000 + b'\n\n: resume {"first_token_index":0,"token_ids":[],"text_length":1}\n\n'
ENDLESS = {
    "whole": (b"content-length: 2000000000", b"y" * 1000),
    "stream": (b"transfer-encoding: chunked\r\nx-holdfast-hold: id 5", b"%x\r\n%b\r\n" % (len(EVENT), EVENT)),
}


@pytest.mark.parametrize("kind", ENDLESS)
@on_a_loop
async def test_a_client_that_reads_nothing_stops_its_router(kind):
    """What is on the way is what sockets take, and what the front keeps of an answer in one piece."""
    head, piece = ENDLESS[kind]
    num_written, has_stopped = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
        while num_written < 2**28:
            writer.write(piece * 100)
            try:
                await asyncio.wait_for(writer.drain(), 1.0)
            except TimeoutError:
                break
            num_written += 100 * len(piece)
        has_stopped.set()
        writer.transport.abort()

    other = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{other.sockets[0].getsockname()[1]}"
    server, front = await start(FrontOptions(routers=[address]), None, RelaySettings(reconnect_s=0.1))
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**10)
    writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
    await has_stopped.wait()
    assert 2**20 < num_written < 2**26
    writer.transport.abort()
    await eventually(lambda: _is_idle(front))
    await server.stop(1.0)
    other.close()


def test_routers_are_checked():
    for wrong in ([], ["ftp://x"], ["http://x:80/v1"]):
        with pytest.raises(ValueError, match=r"routers|address"):
            fronts.upstreams_of(wrong, Tls())


@on_a_loop
async def test_it_speaks_tls_on_both_sides(tmp_path):
    """Routers are called by an address that their certificate need not name; another certificate is refused."""
    authority = Authority(tmp_path)
    own, other = authority.pair("own"), authority.pair("other")
    async with router_with(authority.tls(own, trusts=False)) as router:
        for ca, status in ((own.cert, 200), (other.cert, 503)):
            options = FrontOptions(
                routers=[f"https://{router.http_address}"], tls=Tls(cert=own.cert, key=own.key), routers_tls=Tls(ca=ca)
            )
            server, _ = await start(options, None, RelaySettings(connect_s=0.2))
            trusted = ssl.create_default_context(cafile=authority.tls().ca)
            trusted.check_hostname = False
            async with httpx2.AsyncClient(verify=trusted) as http:
                body = {"model": "fake", "prompt": "hello", "seed": 5, "max_tokens": 3}
                answer = await http.post(f"https://127.0.0.1:{server.port}/v1/completions", json=body)
                assert answer.status_code == status, answer.text
            await server.stop(1.0)


@on_a_loop
async def test_it_has_a_certificate_for_routers_that_ask_for_one(tmp_path):
    """Without one, or with one that they do not trust, they cannot be reached."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    own, client, strange = authority.pair("own"), authority.pair("client"), stranger.pair("strange")
    ca = authority.cert
    body = {"model": "fake", "prompt": "hello", "seed": 5, "max_tokens": 3}
    async with (
        router_with(authority.tls(own)) as router,
        httpx2.AsyncClient(verify=False, timeout=60.0) as http,
    ):
        for routers_tls, status in (
            (Tls(ca=ca, cert=client.cert, key=client.key), 200),
            (Tls(ca=ca), 503),
            (Tls(ca=ca, cert=strange.cert, key=strange.key), 503),
        ):
            options = FrontOptions(routers=[f"https://{router.http_address}"], routers_tls=routers_tls)
            server, _ = await start(options, None, RelaySettings(connect_s=0.2, reconnect_s=0.2))
            answer = await http.post(f"http://127.0.0.1:{server.port}/v1/completions", json=body)
            assert answer.status_code == status, answer.text
            await server.stop(1.0)


@on_a_loop
async def test_files_that_cannot_be_read_are_refused_when_it_starts(tmp_path):
    options = FrontOptions(routers=["https://127.0.0.1:1"], routers_tls=Tls(ca=tmp_path / "none.pem"))
    with pytest.raises(ConfigurationError, match=r"none\.pem"):
        await start(options)
