"""Operators' paths over HTTP: what they order, and that neither strangers nor web pages give orders."""

import asyncio
import logging
from urllib.parse import quote

import httpx
import pytest

from holdfast.router.api.http.admin import MAX_BYTES
from holdfast.router.config import RouterConfig
from holdfast.worker.log_level import PACKAGE
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.test_keys_by_api import OPERATOR, locked
from tests.router.security.test_gate import key_of, secret_of
from tests.router.site import eventually, refusal, request, site

PATHS = (
    *(f"/admin/replicas/x/{verb}" for verb in ("drain", "undrain", "kill")),
    *("/admin/pause", "/admin/resume", "/admin/log-level"),
)


def client_of(place, **options) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{place.router.http_address}", **options)


@on_a_loop
async def test_a_replica_is_drained_and_put_back():
    async with (
        site(await FakeReplica.start(), await FakeReplica.start("r1"), http=True) as place,
        client_of(place) as c,
    ):
        name = (await c.get("/load")).json()["replicas"][0]["replica_id"]
        refused = await c.post("/admin/replicas/nobody/drain", json={})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "replica_id")
        assert name in refused.json()["error"]["message"]
        assert (await c.post(f"/admin/replicas/{quote(name, safe='')}/drain", json={})).json() == {"revision": 1}
        state = (await c.get("/admin/state")).json()
        assert state["orders"]["drained"] == [name]
        assert {one["replica_id"]: one["is_retiring"] for one in state["replicas"]}[name] is True
        assert (await c.post(f"/admin/replicas/{quote(name, safe='')}/undrain", json={})).json() == {"revision": 2}
        assert (await c.get("/admin/state")).json()["orders"]["drained"] == []


@on_a_loop
async def test_a_replica_is_killed_where_that_may_be_and_its_stream_goes_on():
    replicas = [await FakeReplica.start(name, step_s=0.003) for name in ("r0", "r1")]
    async with site(*replicas, http=True, config=RouterConfig(killable=True)) as place, client_of(place) as c:
        assert (await c.get("/cluster")).json()["is_killable"] is True
        refused = await c.post("/admin/replicas/nobody/kill", json={})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "replica_id")
        asked = {"prompt": "x", "max_tokens": 60, "seed": 7}
        undisturbed = (await c.post("/v1/completions", json=asked)).json()["choices"]
        streaming = asyncio.create_task(c.post("/v1/completions", json=asked))

        async def runs() -> bool:
            return any(not one.is_idle for one in replicas)

        await eventually(runs)
        (busy,) = [one for one in replicas if not one.is_idle]
        killed = await c.post(f"/admin/replicas/{busy.replica_id}/kill", json={})
        assert (killed.status_code, killed.json()) == (200, {"revision": 0})
        assert (await streaming).json()["choices"] == undisturbed
        assert (await c.get("/cluster")).json()["events"][0]["kind"] == "lost"
        await busy.killing
        place.replicas.remove(busy)


@on_a_loop
async def test_a_cluster_that_is_no_demonstration_lets_nobody_kill():
    async with site(await FakeReplica.start("r0"), http=True) as place, client_of(place) as c:
        assert (await c.get("/cluster")).json()["is_killable"] is False
        refused = await c.post("/admin/replicas/r0/kill", json={})
        assert refused.status_code == 403
        assert "router.killable is off" in refused.json()["error"]["message"]
        assert len((await c.get("/load")).json()["replicas"]) == 1


@on_a_loop
async def test_a_model_is_paused_and_goes_on():
    async with site(await FakeReplica.start(), http=True) as place, client_of(place) as c:
        await c.post("/admin/pause", json={"model": "fake"})
        waiting = asyncio.create_task(c.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))

        async def waits() -> bool:
            return (await c.get("/admin/state")).json()["requests"]["paused"] == 1

        await eventually(waits)
        await c.post("/admin/resume", json={"model": "fake"})
        assert (await waiting).status_code == 200
        await c.post("/admin/pause", json={"refuse": True})
        assert (await refusal(place.stub.Generate(request()))).reason == "MODEL_PAUSED"
        assert (await c.post("/admin/pause", json={"model": "nothing"})).status_code == 404


@on_a_loop
async def test_the_log_level_changes_and_orders_that_are_not_understood_change_nothing():
    logger = logging.getLogger(PACKAGE)
    level = logger.level
    try:
        async with site(await FakeReplica.start(), http=True) as place, client_of(place) as c:
            assert (await c.post("/admin/log-level", json={"level": "debug"})).status_code == 200
            assert logger.level == logging.DEBUG
            large = {"level": "INFO", "for": "x" * MAX_BYTES}
            for body, param in (
                ({"level": "loud"}, "log_level"),
                ({}, "level"),
                ({"level": "INFO", "for": 3}, "for"),
                (large, "body"),
            ):
                refused = await c.post("/admin/log-level", json=body)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
            assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(level)


@on_a_loop
async def test_where_keys_are_asked_for_an_operators_alone_will_do():
    async with site(await FakeReplica.start(), http=True, **locked(key_of("a"))) as place, client_of(place) as c:
        met = {}
        for name, key in (("nobody", ""), ("user", secret_of("a")), ("operator", OPERATOR)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            met[name] = {(await c.post(path, headers=headers, json={"pauses": 1})).status_code for path in PATHS}
            met[name].add((await c.get("/admin/state", headers=headers)).status_code)
        assert met == {"nobody": {401}, "user": {403}, "operator": {400, 200}}
        from_afar = {"authorization": f"Bearer {OPERATOR}", "x-forwarded-for": "10.0.0.7"}
        assert (await c.get("/admin/state", headers=from_afar)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8000"},
        {"host": ""},
        {"host": "["},
        {"host": "localhost.evil.example"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"x-forwarded-for": "10.0.0.7"},
        {"forwarded": "for=10.0.0.7"},
    ],
)
@on_a_loop
async def test_without_keys_no_web_page_and_no_proxy_gives_orders(headers):
    async with site(await FakeReplica.start(), http=True) as place, client_of(place, headers=headers) as c:
        for path in PATHS:
            assert (await c.post(path, json={})).status_code in (400, 403), path
        assert (await c.get("/admin/state")).status_code in (400, 403)
        assert place.router.operator_state.revision == 0


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
@on_a_loop
async def test_a_body_that_any_page_may_send_is_no_order(kind):
    async with site(await FakeReplica.start(), http=True) as place, client_of(place) as c:
        for path in PATHS:
            refused = await c.post(path, content=b"{}", headers={"content-type": kind} if kind else {})
            assert refused.status_code == 415
            assert "content-type: application/json" in refused.json()["error"]["message"]
        assert place.router.operator_state.revision == 0


@on_a_loop
async def test_the_page_itself_gives_orders():
    async with site(await FakeReplica.start(), http=True) as place, client_of(place) as c:
        own = {"origin": f"http://{place.router.http_address}"}
        assert (await c.post("/admin/log-level", json={"level": "INFO"}, headers=own)).status_code == 200


@pytest.mark.parametrize(("address", "may"), [("127.0.0.1", True), ("::1", True), ("10.0.0.7", False), ("", False)])
@on_a_loop
async def test_without_keys_callers_of_this_machine_alone_are_heard(address, may):
    async with site(await FakeReplica.start(), http=True) as place:
        transport = httpx.ASGITransport(place.router._http_api.app(), client=(address, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as c:
            assert (await c.get("/admin/state")).status_code == (200 if may else 403)
