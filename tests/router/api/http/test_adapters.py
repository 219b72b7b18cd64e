"""Adapters as models of a router: loaded by operators, listed with their parents, and the same one after a failover."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from holdfast.router.requests.request_admission import _check_adapter
from holdfast.router.resume import ResumeRecord
from holdfast.v1 import engine_pb2
from holdfast.worker.adapter import Adapter
from holdfast.worker.errors import VersionGoneError
from holdfast.worker.model_info import with_adapter
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.test_keys_by_api import locked
from tests.router.site import site
from tests.worker.schedulers import make_request

ADAPTERS = "/v1/load_lora_adapter"


def client_of(place, **options) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{place.router.http_address}", **options)


def folder_of(path, content="one"):
    """A folder that routers only hash: replicas read it."""
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_text(content)
    return {"lora_name": "sql", "lora_path": str(path)}


async def asks(client, model, max_tokens=4):
    return await client.post(
        "/v1/completions", json={"model": model, "prompt": "x", "max_tokens": max_tokens, "seed": 7}
    )


@on_a_loop
async def test_loaded_listed_asked_replaced_and_unloaded(tmp_path):
    replica = await FakeReplica.start()
    async with site(replica, http=True) as place, client_of(place) as client:
        assert (await asks(client, "sql")).status_code == 404
        body = folder_of(tmp_path / "sql")
        loaded = await client.post(ADAPTERS, json=body)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        adapter = Adapter.in_folder("sql", body["lora_path"])
        tried = replica.submits[-1].adapter
        assert (tried.name, tried.digest, tried.path, tried.pinned) == tuple(adapter)
        models = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
        assert models["sql"]["parent"] == "fake"
        assert (models["sql"]["digest"], models["sql"]["root"]) == (adapter.digest, adapter.path)
        assert (await client.get("/v1/models/sql")).json()["parent"] == "fake"
        answer = (await asks(client, "sql")).json()
        assert replica.submits[-1].adapter.digest == adapter.digest
        assert f"lora-{adapter.digest[:16]}" in answer["system_fingerprint"]
        assert answer["model"] == "sql"
        assert not (await asks(client, "fake")).json()["system_fingerprint"].count("lora-")
        assert not replica.submits[-1].HasField("adapter")
        folder_of(tmp_path / "sql", "two")
        refused = await client.post(ADAPTERS, json=body)
        assert refused.status_code == 400
        assert "load_inplace (--replace)" in refused.json()["error"]["message"]
        assert (await client.post(ADAPTERS, json={**body, "load_inplace": True})).status_code == 200
        await asks(client, "sql")
        assert replica.submits[-1].adapter.digest != adapter.digest
        unknown = (await asks(client, "sqq")).json()["error"]["message"]
        assert unknown == "model 'sqq' is not served here; served: fake, sql"
        gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert (await asks(client, "sql")).status_code == 404
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 404


@on_a_loop
async def test_those_that_replicas_were_started_with(tmp_path):
    replica = await FakeReplica.start()
    replica.adapters = [engine_pb2.Adapter(name="legal", digest="d" * 64, path="/legal")]
    async with site(replica, http=True) as place, client_of(place) as client:
        assert (await asks(client, "legal")).json()["model"] == "legal"
        assert replica.submits[-1].adapter.path == "/legal"
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(one["id"], one["parent"]) for one in listed] == [("fake", None), ("legal", "fake")]
        await client.post("/v1/unload_lora_adapter", json={"lora_name": "legal"})
        assert (await asks(client, "legal")).status_code == 404


@on_a_loop
async def test_refused_before_anything_changes(tmp_path):
    replica = await FakeReplica.start()
    async with site(replica, http=True) as place, client_of(place) as client:
        body = folder_of(tmp_path / "sql")
        for change, told in (
            ({"lora_name": "../up"}, "lora_name"),
            ({"lora_name": "fake"}, "is the name of a model"),
            ({"lora_path": str(tmp_path / "nowhere")}, "cannot be read"),
        ):
            refused = await client.post(ADAPTERS, json={**body, **change})
            assert refused.status_code == 400, refused.text
            assert told in refused.json()["error"]["message"]
        replica.refusal = engine_pb2.Rejection(field="model", message="use_dora is not served")
        refused = await client.post(ADAPTERS, json=body)
        replica.refusal = None
        assert refused.status_code == 400
        assert "use_dora is not served" in refused.json()["error"]["message"]
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["fake"]


@on_a_loop
async def test_a_failover_goes_on_with_the_same_content(tmp_path):
    """Also where the name means another adapter by then."""
    replicas = [await FakeReplica.start(name, step_s=0.01) for name in ("r0", "r1")]
    async with site(*replicas, http=True) as place, client_of(place, timeout=30) as client:
        body = folder_of(tmp_path / "sql")
        await client.post(ADAPTERS, json=body)
        digest = Adapter.in_folder("sql", body["lora_path"]).digest
        undisturbed = (await asks(client, "sql", 40)).json()["choices"]
        streaming = asyncio.create_task(asks(client, "sql", 40))
        while not any(not one.is_idle for one in replicas):
            await asyncio.sleep(0)
        (busy,) = [one for one in replicas if not one.is_idle]
        (other,) = [one for one in replicas if one is not busy]
        other.submits.clear()
        before = busy.num_tokens
        await busy.until(lambda: busy.num_tokens >= before + 3)
        busy.pause()
        folder_of(tmp_path / "sql", "two")
        await client.post(ADAPTERS, json={**body, "load_inplace": True})
        await busy.kill()
        place.replicas.remove(busy)
        assert (await streaming).json()["choices"] == undisturbed
        went_on = [one for one in other.submits if one.output_token_ids]
        assert {one.adapter.digest for one in went_on} == {digest}


def names_of(adapters) -> list[str]:
    return [one.name for one in adapters]


@on_a_loop
async def test_a_pinned_adapter_is_told_to_each_replica_also_to_one_that_comes_back(tmp_path):
    replica = await FakeReplica.start()
    replica.max_loras = 3
    replica.adapters = [engine_pb2.Adapter(name="legal", digest="d" * 64, path="/legal", pinned=True)]
    async with site(replica, http=True) as place, client_of(place) as client:
        await replica.until(lambda: len(replica.kept) == 1)
        assert names_of(replica.kept[0]) == ["legal"]
        body = folder_of(tmp_path / "sql")
        assert (await client.post(ADAPTERS, json=body)).status_code == 200
        listed = (await client.get("/v1/models")).json()["data"]
        assert {one["id"]: one.get("pinned") for one in listed} == {"fake": None, "legal": True, "sql": False}
        assert (await client.post(ADAPTERS, json={**body, "pinned": True})).status_code == 200
        await replica.until(lambda: len(replica.kept) == 2)
        assert names_of(replica.kept[1]) == ["legal", "sql"]
        assert replica.kept[1][1] == engine_pb2.Adapter(
            **Adapter.in_folder("sql", body["lora_path"], pinned=True)._asdict()
        )
        await replica.kill()
        again = await FakeReplica.start(port=replica.port)  # as after the replica's restart
        again.max_loras, again.adapters = replica.max_loras, replica.adapters
        place.replicas[:] = [again]
        await again.until(lambda: bool(again.kept))
        assert names_of(again.kept[-1]) == ["legal", "sql"]
        assert (await client.post(ADAPTERS, json=body)).status_code == 200  # as the last load says
        await again.until(lambda: names_of(again.kept[-1]) == ["legal"])
        await client.post("/v1/unload_lora_adapter", json={"lora_name": "legal"})
        await again.until(lambda: names_of(again.kept[-1]) == [])
        await again.kill()


@on_a_loop
async def test_a_pin_that_would_take_the_last_slot_is_refused_before_anything_is_loaded(tmp_path):
    replica = await FakeReplica.start()
    replica.max_loras = 2
    async with site(replica, http=True) as place, client_of(place) as client:
        body = folder_of(tmp_path / "sql")
        assert (await client.post(ADAPTERS, json={**body, "pinned": True})).status_code == 200
        other = {**folder_of(tmp_path / "other", "two"), "lora_name": "other", "pinned": True}
        num_tried = len(replica.submits)
        refused = await client.post(ADAPTERS, json=other)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pinned")
        assert "last slot of a replica: other, sql of model.max_loras = 2" in refused.text
        assert len(replica.submits) == num_tried
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["fake", "sql"]
        assert (await client.post(ADAPTERS, json={**body, "pinned": True})).status_code == 200
        assert (await client.post(ADAPTERS, json={**other, "pinned": False})).status_code == 200
        await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert (await client.post(ADAPTERS, json=other)).status_code == 200


@on_a_loop
async def test_operators_alone_load_adapters(tmp_path):
    async with site(await FakeReplica.start(), http=True, **locked()) as place, client_of(place) as client:
        refused = await client.post(ADAPTERS, json=folder_of(tmp_path / "sql"))
        assert refused.status_code in (401, 403), json.dumps(refused.json())


@pytest.mark.parametrize(
    ("before", "now", "goes_on"),
    [
        ("", "", True),
        ("a" * 64, "a" * 64, True),
        ("a" * 64, "b" * 64, False),
        ("a" * 64, "", False),
        ("", "b" * 64, False),
    ],
)
def test_a_resumed_answer_goes_on_with_its_own_adapter_or_not_at_all(before, now, goes_on):
    resume = ResumeRecord(sequences=(), fingerprint=with_adapter("fake/tp1/row-invariant/01234567", before))
    asked = replace(make_request("r"), adapter=Adapter("sql", now, "/sql") if now else None)
    if goes_on:
        _check_adapter(asked, resume)
    else:
        with pytest.raises(VersionGoneError, match="another adapter"):
            _check_adapter(asked, resume)
