"""The page's files: open to everyone, shut to everything else; and what its endpoint says of the cluster."""

import re

import httpx2
import pytest

from holdfast.router.api.http.page_files import FOLDER, PAGE
from holdfast.router.security.gate import Gate
from holdfast.v1 import engine_pb2
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.security.test_gate import Keys, key_of, secret_of
from tests.router.site import eventually, site

CODE = {path: (FOLDER / name).read_text() for path, (name, _) in PAGE.items()}


async def got(place, path: str, **headers: str) -> httpx2.Response:
    async with httpx2.AsyncClient() as client:
        return await client.get(f"http://{place.router.http_address}{path}", headers=headers)


def locked() -> Gate:
    return Gate(Keys(key_of("alice"), key_of("olga", operator=True)))


@on_a_loop
async def test_the_page_is_open_and_its_calls_want_a_key():
    replica = await FakeReplica.start("one")
    keys = {"gate": locked(), "key": secret_of("olga")}
    async with site(replica, http=True, **keys) as place:
        for path, (name, media_type) in PAGE.items():
            answer = await got(place, path)
            assert answer.status_code == 200
            assert answer.content == (FOLDER / name).read_bytes()
            assert answer.headers["content-type"] == f"{media_type}; charset=utf-8"
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "unsafe" not in answer.headers["content-security-policy"]
        statuses = [
            (await got(place, "/cluster", **{"x-api-key": key})).status_code
            for key in ("", secret_of("alice"), secret_of("olga"))
        ]
        assert statuses == [401, 403, 200]
        assert (await got(place, "/v1/models")).status_code == 401


def test_nothing_comes_from_elsewhere_and_no_text_becomes_markup():
    for path, code in CODE.items():
        assert not re.findall(r"https?://|//[a-z]+\.", code), path
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", code), path
        assert not re.findall(r"localStorage|sessionStorage|document\.cookie|indexedDB", code), path
    assert not re.findall(r"\son\w+=|<style|style=|<script(?! type=\"module\" src=)", CODE["/"])


def test_every_id_that_the_code_asks_for_is_on_the_page_and_labelled():
    asked = {name for code in CODE.values() for name in re.findall(r"\bat\(\"(\w+)\"\)", code)}
    asked |= {name for code in CODE.values() for name in re.findall(r"\bnumber\(\"(\w+)\"\)", code)}
    there = set(re.findall(r'id="(\w+)"', CODE["/"]))
    assert asked <= there
    for field in re.findall(r"<(?:input|select|textarea)[^>]*id=\"(\w+)\"", CODE["/"]):
        is_labelled = rf'<label[^>]*for="{field}"|<label[^>]*>[^<]*<(?:input|select|textarea)[^>]*id="{field}"'
        assert re.search(is_labelled, CODE["/"]), field


@on_a_loop
async def test_the_view_tells_who_sent_blocks_to_whom():
    replicas = [await FakeReplica.start("one"), await FakeReplica.start("two")]
    stats = engine_pb2.EngineStats(received_tokens_from={replicas[0].endpoint.address: 640, "10.0.0.9:7": 16})
    async with site(*replicas, http=True) as place:

        async def received() -> dict[str, dict[str, int]]:
            replicas[1].say(engine_pb2.StepUpdate(stats=stats))
            seen = (await got(place, "/cluster")).json()["replicas"]
            return {one["replica_id"]: one["received_from"] for one in seen if "num_cached_blocks" in one}

        await eventually(lambda: received())
        assert await received() == {"two": {"one": 640, "10.0.0.9:7": 16}}
        lines = (await got(place, "/metrics")).text.splitlines()
        # a set: the order is that of a protobuf map, which differs between processes
        assert {line for line in lines if line.startswith("holdfast_transferred_tokens_total")} == {
            'holdfast_transferred_tokens_total{model="fake",replica="two",sender="one"} 640.0',
            'holdfast_transferred_tokens_total{model="fake",replica="two",sender="10.0.0.9:7"} 16.0',
        }


@on_a_loop
async def test_the_view_tells_of_replicas_and_of_what_happens_to_them():
    replicas = [await FakeReplica.start("one"), await FakeReplica.start("two")]
    async with site(*replicas, http=True) as place:
        seen = (await got(place, "/cluster")).json()
        assert [one["kind"] for one in seen["events"]] == ["up", "up"]
        assert {one["replica_id"] for one in seen["replicas"]} == {"one", "two"}
        assert seen["replicas"][0]["num_ranks"] == 2  # as a fake replica says of itself
        assert [one["role"] for one in seen["replicas"]] == ["", ""]
        (model,) = seen["models"]
        assert (model["quantization"], model["weight_bytes"]) == ("GGUF Q4_1", 3 << 20)
        assert (seen["open"], seen["queued"], seen["waiting"]) == (0, 0, [])
        await replicas[1].kill()
        place.replicas.remove(replicas[1])
        await place.until_up(1)
        (lost, *_) = (await got(place, "/cluster")).json()["events"]
        assert (lost["kind"], lost["replica_id"], lost["model"]) == ("lost", "two", "fake")
        assert "two was lost" in lost["reason"]


@on_a_loop
@pytest.mark.parametrize("asks", [False, True])
async def test_marks_say_replicas_where_they_are_asked_to(asks):
    replica = await FakeReplica.start("one")
    async with site(replica, http=True) as place, httpx2.AsyncClient() as client:
        headers = {"x-holdfast-hold": "1"} | ({"x-holdfast-replicas": "1"} if asks else {})
        body = {"model": "fake", "prompt": "hello", "max_tokens": 5, "stream": True, "seed": 1}
        answer = await client.post(f"http://{place.router.http_address}/v1/completions", json=body, headers=headers)
    marks = re.findall(r"^: resume (.*)$", answer.text, re.MULTILINE)
    assert marks
    assert all(('"replica_id":"one"' in mark) is asks for mark in marks)
