"""Where requests come from: without keys, no page of another site and no other name; and what HTTP itself forbids."""

import asyncio

import pytest
from starlette.requests import Request

from holdfast.router.api.http.files import PATH as FILES
from holdfast.router.api.http.request_origin import OPEN, RequestOrigins
from holdfast.router.config import RouterConfig
from holdfast.worker.errors import PermissionDeniedError
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.http.test_admin import client_of
from tests.router.api.test_keys_by_api import locked
from tests.router.security.test_gate import key_of, secret_of
from tests.router.site import site

COMPLETION = {"prompt": "x", "max_tokens": 1}


def sent(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


def may_come(origins: RequestOrigins, **headers: str) -> bool:
    try:
        origins.check(sent(**headers))
    except PermissionDeniedError as refused:
        return "router.http_allowed_hosts" not in str(refused)
    return True


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "LocalHost"]
)
def test_a_server_on_loopback_answers_for_loopback(host):
    assert may_come(RequestOrigins(), host=host)
    assert may_come(RequestOrigins(), host=host, origin=f"http://{host}")
    assert not may_come(RequestOrigins(), host=host, origin="https://evil.example")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "", "["])
def test_it_answers_for_no_other_name_unless_that_is_given(host):
    assert not may_come(RequestOrigins(), host=host)
    assert not may_come(RequestOrigins(), host=host, origin=f"http://{host}")
    assert not may_come(RequestOrigins(allowed_hosts=["llm.example"]), host=host)


def test_names_that_are_given_are_the_servers_own_and_their_pages_may_call():
    origins = RequestOrigins(allowed_hosts=["llm.example", "app.example"])
    assert may_come(origins, host="llm.example:8000")
    assert may_come(origins, host="llm.example", origin="https://app.example:3000")
    assert not may_come(origins, host="llm.example", origin="https://other.example")


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "10.0.0.5"])
def test_a_server_for_other_machines_answers_for_any_name_unless_names_are_given(bound):
    assert may_come(RequestOrigins(bound), host="anything.example")
    assert not may_come(RequestOrigins(bound), host="a.example", origin="http://b.example")
    given = RequestOrigins(bound, ["llm.example"])
    assert may_come(given, host="llm.example")
    assert may_come(given, host="localhost")
    assert not may_come(given, host="evil.example")
    assert may_come(given, host=f"{bound}:8000") or ":" in bound


@pytest.mark.parametrize("origin", ["null", "http://localhost:3000", "http://[", "https://localhost.evil.example"])
def test_pages_of_other_origins_do_not_call(origin):
    assert not may_come(RequestOrigins(), host="localhost:8000", origin=origin)


def test_what_a_browser_says_of_a_request_without_origin_is_heard():
    assert not may_come(RequestOrigins(), host="localhost", sec_fetch_site="cross-site")
    assert not may_come(RequestOrigins(), host="localhost", sec_fetch_site="same-site")
    for own in ("same-origin", "none"):
        assert may_come(RequestOrigins(), host="localhost", sec_fetch_site=own)


def routes_of(place) -> list[tuple[str, str]]:
    """Method and path of everything that is served, but what is open to everyone."""
    routes = [
        (method, route.path.replace("{model:path}", "fake").replace("{replica_id}", "x"))
        for route in place.router._http_api.app().routes
        for method in route.methods - {"HEAD"}
    ]
    assert len(routes) > 25
    return [(method, path) for method, path in routes if path not in OPEN]


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
@on_a_loop
async def test_every_route_of_a_server_without_keys_refuses_pages_and_names_of_others(headers):
    async with site(await FakeReplica.start(), http=True) as place, client_of(place, headers=headers) as client:
        for method, path in routes_of(place):
            refused = await client.request(method, path, **({"json": {}} if method == "POST" else {}))
            assert refused.status_code == 403, path
            assert not refused.headers.get("access-control-allow-origin")
        for path in OPEN:
            assert (await client.get(path)).status_code == 200, path
        assert not place.replicas[0].submits


@on_a_loop
async def test_every_post_is_refused_unless_its_body_is_called_what_it_is():
    async with site(await FakeReplica.start(), http=True) as place, client_of(place) as client:
        for method, path in routes_of(place):
            if method != "POST":
                continue
            for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
                headers = {"content-type": kind} if kind else {}
                refused = await client.post(path, content=b'{"prompt": "x"}', headers=headers)
                assert refused.status_code == 415, path
                assert ("multipart/form-data" if path == FILES else "content-type: application/json") in refused.text
        json = {"content-type": "Application/JSON; charset=utf-8"}
        answer = await client.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=json)
        assert answer.status_code == 200


@on_a_loop
async def test_where_keys_are_asked_for_the_key_alone_counts():
    async with site(await FakeReplica.start(), http=True, **locked(key_of("a"))) as place:
        headers = {"x-api-key": secret_of("a"), "host": "llm.example", "origin": "https://app.example"}
        async with client_of(place, headers=headers) as client:
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


@on_a_loop
async def test_names_are_given_by_a_setting():
    config = RouterConfig(http_allowed_hosts="LLM.example, app.example", max_reconnect_s=0.1)
    assert config.http_allowed_hosts == ("llm.example", "app.example")
    async with site(await FakeReplica.start(), http=True, config=config) as place:
        headers = {"host": "llm.example", "origin": "https://app.example"}
        async with client_of(place, headers=headers) as client:
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
    for wrong in ("https://llm.example", "llm.example:8000", "*"):
        with pytest.raises(ValueError, match="http_allowed_hosts"):
            RouterConfig(http_allowed_hosts=wrong)


GET = b"GET /v1/models HTTP/1.1\r\n"


async def raw(place, request: bytes) -> bytes:
    """The first line of the answer."""
    host, _, port = place.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    line = await reader.readline()
    writer.close()
    return line


@pytest.mark.parametrize("keys", [{}, locked(key_of("a"))])
@pytest.mark.parametrize(
    "request_",
    [
        GET + b"host: localhost\r\nhost: evil.example\r\n\r\n",
        GET + b"Host: localhost\r\nhOST: localhost\r\n\r\n",
        GET + b"\r\n",
        GET + b"host: localhost, evil.example\r\n\r\n",
        GET + b"host: localhost/evil\r\n\r\n",
        GET + b"host: user@localhost\r\n\r\n",
        b"GET http://evil.example/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n",
        GET + b"host: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n\r\n",
    ],
)
@on_a_loop
async def test_a_request_has_one_host_and_asks_for_no_websocket(request_, keys):
    async with site(await FakeReplica.start(), http=True, **keys) as place:
        assert b" 400 " in await raw(place, request_)


@on_a_loop
async def test_an_offer_of_http2_is_left_and_the_request_is_served():
    """Java's HTTP client offers it with each first request."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    async with site(await FakeReplica.start(), http=True) as place:
        assert b" 200 " in await raw(place, GET + b"host: localhost\r\n" + offer + b"\r\n")
        posted = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n" + offer + b"\r\n{}"
        assert b" 400 " in await raw(place, posted)  # the parser would lose the body, and the answer blame it
        assert b" 200 " in await raw(place, b"GET /health HTTP/1.0\r\n\r\n")


@on_a_loop
async def test_http_connections_without_a_key_are_as_many_as_they_may_be_and_their_calls_too():
    limits = {"max_unauthenticated_connections": 5, "max_unauthenticated_calls_per_s": 1}
    async with site(await FakeReplica.start(), http=True, **locked(key_of("a"), **limits)) as place:
        host, _, port = place.router.http_address.rpartition(":")
        headers = {"x-api-key": secret_of("a")}
        async with client_of(place, headers=headers) as known:
            assert (await known.get("/v1/models")).status_code == 200
            held = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
            _, writer = await asyncio.open_connection(host, int(port))
            assert await held[0][0].read() == b""  # the oldest goes
            assert (await known.get("/v1/models")).status_code == 200
            for _, one in (*held, (None, writer)):
                one.close()
            async with client_of(place) as stranger:
                answers = [await stranger.get("/v1/models") for _ in range(11)]
                assert [answer.status_code for answer in answers] == [401] * 11
                assert answers[0].headers.get("connection") != "close"
                assert answers[-1].headers["connection"] == "close"
            assert (await known.get("/v1/models")).status_code == 200
        cut = place.router._ports._guard.num_cut
        assert cut["http", "connections_without_key"] == 1
        assert cut["http", "calls_without_key"] == 1


PAGE_ORIGIN = "https://app.example:3000"


def test_origins_of_pages_are_given_by_a_setting():
    given = RouterConfig(http_cors_origin="https://App.example:3000/, http://localhost:5173", max_reconnect_s=0.1)
    assert given.http_cors_origin == (PAGE_ORIGIN, "http://localhost:5173")
    assert RouterConfig(http_cors_origin="*", max_reconnect_s=0.1).http_cors_origin == ("*",)
    for wrong in ("app.example", "https://app.example/path", "https://", "https://a.example?x", "http://["):
        with pytest.raises(ValueError, match="http_cors_origin"):
            RouterConfig(http_cors_origin=wrong)


@pytest.mark.parametrize("allowed", [PAGE_ORIGIN, "*"])
@on_a_loop
async def test_a_page_whose_origin_is_given_may_call_and_read_answers_errors_and_streams(allowed):
    config = RouterConfig(http_cors_origin=allowed, max_reconnect_s=0.1)
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "content-type, x-api-key"}
    async with (
        site(await FakeReplica.start(), http=True, config=config) as place,
        client_of(place, headers={"origin": PAGE_ORIGIN}) as client,
    ):
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/models"):
            answer = await client.options(path, headers=preflight)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, allowed)
            assert "x-api-key" in answer.headers["access-control-allow-headers"]
        streamed = {**COMPLETION, "stream": True}
        for body, status in ((COMPLETION, 200), (streamed, 200), ({"prompt": 7}, 400), ({**streamed, "n": -1}, 400)):
            answer = await client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, allowed)
            assert "retry-after" in answer.headers["access-control-expose-headers"]
        assert (await client.get("/nowhere")).headers["access-control-allow-origin"] == allowed
        plain = await client.post("/v1/completions", json=COMPLETION, headers={"host": "evil.example"})
        assert plain.status_code == 403, "another name stays another name"


@on_a_loop
async def test_other_pages_and_paths_of_operators_are_as_they_were():
    config = RouterConfig(http_cors_origin=PAGE_ORIGIN, max_reconnect_s=0.1)
    asks = {"access-control-request-method": "POST"}
    async with site(await FakeReplica.start(), http=True, config=config) as place, client_of(place) as client:
        other = {"origin": "https://evil.example"}
        assert (await client.options("/v1/completions", headers={**other, **asks})).status_code == 400
        for headers in (other, {"sec-fetch-site": "cross-site"}):
            refused = await client.post("/v1/completions", json=COMPLETION, headers=headers)
            assert refused.status_code == 403
            assert "access-control-allow-origin" not in refused.headers
        named = {"origin": PAGE_ORIGIN}
        for path in ("/cluster", "/load", "/metrics", "/admin/state"):
            refused = await client.get(path, headers=named)
            assert refused.status_code == 403, path
            assert "access-control-allow-origin" not in refused.headers
        assert (await client.post("/admin/pause", json={}, headers=named)).status_code == 403
        assert (await client.options("/admin/pause", headers={**named, **asks})).status_code == 405
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
    async with site(await FakeReplica.start(), http=True) as place, client_of(place) as client:
        assert (await client.options("/v1/completions", headers={**named, **asks})).status_code == 405


@on_a_loop
async def test_a_page_that_may_call_needs_a_key_where_keys_are_asked_for():
    config = RouterConfig(http_cors_origin=PAGE_ORIGIN, max_reconnect_s=0.1)
    async with (
        site(await FakeReplica.start(), http=True, config=config, **locked(key_of("a"))) as place,
        client_of(place, headers={"origin": PAGE_ORIGIN}) as client,
    ):
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        assert (await client.options("/v1/completions", headers=asks)).status_code == 200
        refused = await client.post("/v1/completions", json=COMPLETION)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE_ORIGIN)
        key = {"authorization": f"Bearer {secret_of('a')}"}
        assert (await client.post("/v1/completions", json=COMPLETION, headers=key)).status_code == 200
