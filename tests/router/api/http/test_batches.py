"""Files and batches as OpenAI's client uses them: each line's result once, whatever router computes it."""

import asyncio
import io
import json
import re
import time
from collections.abc import Sequence

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletion

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.commands.status import RouterStatus, _router_lines
from holdfast.router.api.http import batch_lines
from holdfast.router.api.http.request_reader import TENANT
from holdfast.router.config import RouterConfig
from holdfast.router.store import job_store, object_store
from holdfast.router.store.batch_store import BatchStore, result_line
from holdfast.router.store.database import Database
from holdfast.router.store.file_store import FileStore
from holdfast.router.store.job_store import JobStore
from holdfast.router.store.object_store import ObjectStore, StoreLimits
from holdfast.router.store.response_store import ResponseStore
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.http.test_metrics import scraped
from tests.router.api.http.test_stored_responses import storing
from tests.router.api.test_keys_by_api import locked
from tests.router.security.test_gate import key_of, secret_of
from tests.router.site import Site, site

CHATS = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(batch_lines, "LOOK_EVERY_S", 0.02)


def line(custom_id: str, url: str = CHATS, method: str = "POST", **body: object) -> dict[str, object]:
    asked = {"model": "fake", "max_tokens": 6, "seed": 5, "messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "method": method, "url": url, "body": asked | body}


def text_of(lines: Sequence[object]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def uploaded(client: openai.AsyncOpenAI, content: bytes, **options: object) -> str:
    file = await client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch", **options)
    assert file.bytes == len(content)
    return file.id


async def submitted(client: openai.AsyncOpenAI, lines: Sequence[object], **options: object):
    file_id = await uploaded(client, text_of(lines))
    asked = {"completion_window": "24h", "endpoint": CHATS} | options
    return await client.batches.create(input_file_id=file_id, **asked)


async def until_over(client: openai.AsyncOpenAI, batch_id: str, **options: object):
    async with asyncio.timeout(30):
        while (found := await client.batches.retrieve(batch_id, **options)).status == "in_progress":
            await asyncio.sleep(0.02)
    return found


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict]:
    if file_id is None:
        return []
    return [json.loads(one) for one in (await client.files.content(file_id)).text.splitlines()]


@on_a_loop
async def test_lines_are_answered_as_requests_are_and_those_that_fail_are_apart(tmp_path):
    lines = [line("a"), line("b", temperature=-1), line("c", n=2), line("d", max_tokens="many"), line("e")]
    async with storing(tmp_path) as (place, client):
        made = await submitted(client, lines, metadata={"of": "tests"})
        assert (made.status, made.request_counts.total, made.model) == ("in_progress", 5, "fake")
        over = await until_over(client, made.id)
        assert (over.status, over.metadata) == ("completed", {"of": "tests"})
        counts = over.request_counts
        assert (counts.total, counts.completed, counts.failed) == (5, 3, 2)
        found = await results(client, over.output_file_id)
        assert [one["custom_id"] for one in found] == ["a", "c", "e"]
        for one in found:
            same = next(asked for asked in lines if asked["custom_id"] == one["custom_id"])
            answer = await client.chat.completions.create(**same["body"])
            assert ChatCompletion.model_validate(one["response"]["body"]).choices == answer.choices
            assert (one["response"]["status_code"], one["error"]) == (200, None)
        wrong = await results(client, over.error_file_id)
        assert [(one["custom_id"], one["response"]["status_code"]) for one in wrong] == [("b", 400), ("d", 400)]
        assert wrong[0]["response"]["body"]["error"]["param"] == "temperature"
        assert {submit.priority for submit in place.replicas[0].submits[:2]} == {3}
        listed = [one.id async for one in client.batches.list(limit=1)]
        assert listed == [made.id]
        output = await client.files.retrieve(over.output_file_id)
        assert (output.purpose, output.filename) == ("batch_output", f"{made.id}_output.jsonl")


@on_a_loop
async def test_text_completions_and_responses_are_lines_too(tmp_path):
    async with storing(tmp_path) as (_, client):
        texts = [line("a", "/v1/completions", prompt="hello"), line("b", "/v1/completions", prompt=["x", "y"])]
        over = await until_over(client, (await submitted(client, texts, endpoint="/v1/completions")).id)
        first, second = await results(client, over.output_file_id)
        assert len(first["response"]["body"]["choices"]) == 1
        assert len(second["response"]["body"]["choices"]) == 2
        responses = [line("a", "/v1/responses", input="hello"), line("b", "/v1/responses", input="x", store=True)]
        for one in responses:
            one["body"]["max_output_tokens"] = one["body"].pop("max_tokens")
        over = await until_over(client, (await submitted(client, responses, endpoint="/v1/responses")).id)
        unkept, kept = (one["response"]["body"] for one in await results(client, over.output_file_id))
        assert (await client.responses.retrieve(kept["id"])).output_text
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept["id"])


@on_a_loop
async def test_what_is_wrong_with_a_file_is_told_by_line(tmp_path):
    wrong = [
        b"{",
        b"",
        b"[]",
        json.dumps(line("a", method="GET")).encode(),
        json.dumps(line("b", url="/v1/completions")).encode(),
        json.dumps({**line("c"), "body": None}).encode(),
        json.dumps(line("a")).encode(),
        json.dumps(line("", "x")).encode(),
        json.dumps(line("d", model="another")).encode(),
        json.dumps(line("e", stream=True)).encode(),
        json.dumps(line("f")).encode(),
    ]
    async with storing(tmp_path) as (place, client):
        file_id = await uploaded(client, b"\n".join(wrong))
        failed = await client.batches.create(input_file_id=file_id, endpoint=CHATS, completion_window="24h")
        assert failed.status == (await client.batches.retrieve(failed.id)).status == "failed"
        assert [(one.line, one.code) for one in failed.errors.data] == [
            (1, "invalid_json_line"),
            (3, "invalid_json_line"),
            (4, "invalid_method"),
            (5, "mismatched_url"),
            (6, "missing_required_parameter"),
            (7, "duplicate_custom_id"),
            (8, "missing_required_parameter"),
            (9, "model_not_found"),
            (10, "invalid_request"),
        ]
        empty = await client.batches.create(
            input_file_id=await uploaded(client, b"\n"), endpoint=CHATS, completion_window="24h"
        )
        assert [one.code for one in empty.errors.data] == ["empty_file"]
        for change, reason in (
            ({"endpoint": "/v1/moderations"}, "endpoint must be one of"),
            ({"completion_window": "1y"}, "completion_window must be"),
            ({"metadata": {"a": 1}}, "metadata.a must be text"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds must"),
        ):
            asked = {"endpoint": CHATS, "completion_window": "24h"} | change
            with pytest.raises(openai.BadRequestError, match=reason):
                await client.batches.create(input_file_id=file_id, **asked)
        with pytest.raises(openai.NotFoundError, match="file"):
            await client.batches.create(input_file_id="file-1", endpoint=CHATS, completion_window="24h")
        assert place.replicas[0].submits == []


@on_a_loop
async def test_another_router_goes_on_with_the_lines_that_have_no_result(tmp_path, monkeypatch):
    lines = [line(f"line {number}", max_tokens=20, seed=None) for number in range(12)]
    async with storing(tmp_path, batch_concurrency=4) as (place, client):
        place.replicas[0].step_s = 0.01
        made = await submitted(client, lines)
        async with asyncio.timeout(20):
            while len(place.replicas[0].submits) <= 4:
                await asyncio.sleep(0.01)
        await place.router.stop()
        first = {submit.request_id: submit for submit in place.replicas[0].submits}
    assert 4 < len(first) < 12
    async with storing(tmp_path) as (place, client):
        over = await until_over(client, made.id)
        assert (over.request_counts.completed, over.request_counts.failed) == (12, 0)
        found = await results(client, over.output_file_id)
        assert [one["custom_id"] for one in found] == [one["custom_id"] for one in lines]
        again = {submit.request_id: submit for submit in place.replicas[0].submits}
        assert len(again) < 12, "lines that had a result were computed again"
        both = first.keys() & again.keys()
        assert both, "no line was under way"
        for name in both:
            same = [(one.prompt_token_ids[:], one.sampling_params.seed) for one in (first[name], again[name])]
            assert same[0] == same[1]


@on_a_loop
async def test_a_line_whose_lease_was_lost_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(job_store, "LEASE_S", 0.2)
    async with storing(tmp_path) as (slow, client):
        slow.replicas[0].pause()
        made = await submitted(client, [line("a"), line("b")])
        async with asyncio.timeout(10):
            while len(slow.replicas[0].submits) < 2:
                await asyncio.sleep(0.01)
        lines = slow.router._http_api.batches.lines
        lines._looking.cancel()  # it renews no lease
        objects = ObjectStore(await Database.open(str(tmp_path)), StoreLimits())
        others = JobStore(ResponseStore(objects), "another router")
        async with asyncio.timeout(10):
            while len(claimed := await others.claim(8, of_batches=True)) < 2:
                await asyncio.sleep(0.05)
        batches = BatchStore(FileStore(objects), others)
        right = [result_line(job.id, job.content, {"by": "another router"}, None) for job in claimed]
        assert await batches.finish(claimed[0], right[0], is_error=False)
        slow.replicas[0].resume()
        async with asyncio.timeout(10):
            while lines._runs:
                await asyncio.sleep(0.01)
        assert (await client.batches.retrieve(made.id)).status == "in_progress"
        assert await batches.finish(claimed[1], right[1], is_error=False)
        assert not await batches.finish(claimed[1], right[1], is_error=False)
        over = await client.batches.retrieve(made.id)
        assert (over.status, over.request_counts.completed) == ("completed", 2)
        assert (await client.files.content(over.output_file_id)).content == b"".join(right)
        await objects.database.close()


@on_a_loop
async def test_a_batch_is_cancelled_with_its_results_so_far(tmp_path):
    async with storing(tmp_path, batch_concurrency=1) as (place, client):
        made = await submitted(client, [line("a"), line("b", max_tokens=90_000), line("c")])
        async with asyncio.timeout(10):
            while len(place.replicas[0].submits) < 2:
                await asyncio.sleep(0.01)
        over = await client.batches.cancel(made.id)
        assert (over.status, over.request_counts.completed) == ("cancelled", 1)
        assert [one["custom_id"] for one in await results(client, over.output_file_id)] == ["a"]
        assert (await client.batches.cancel(made.id)).cancelled_at == over.cancelled_at
        async with asyncio.timeout(20):
            await place.until_idle()


@on_a_loop
async def test_lines_without_a_result_at_the_end_of_the_window_are_errors(tmp_path):
    async with storing(tmp_path) as (place, client):
        place.replicas[0].pause()
        made = await submitted(client, [line("a"), line("b")], completion_window="1m")
        place.router._http_api.history.store.database._now = lambda: time.time() + 61
        over = await until_over(client, made.id)
        assert (over.status, over.request_counts.failed) == ("expired", 2)
        errors = await results(client, over.error_file_id)
        assert [(one["custom_id"], one["error"]["code"]) for one in errors] == [
            ("a", "batch_expired"),
            ("b", "batch_expired"),
        ]
        place.replicas[0].resume()


@on_a_loop
async def test_files_are_uploaded_listed_read_and_deleted_for_good(tmp_path):
    content = bytes(range(256)) * 4000 + b"a secret that nobody else has"
    async with storing(tmp_path, store_max_file_bytes=len(content)) as (place, client):
        made = await client.files.create(
            file=("ä.bin", io.BytesIO(content)),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (made.filename, made.bytes, made.expires_at) == ("ä.bin", len(content), made.created_at + 3600)
        other = await uploaded(client, b"{}")
        assert (await client.files.content(made.id)).content == content
        assert [one.id async for one in client.files.list(order="asc")] == [made.id, other]
        assert [one.id async for one in client.files.list(purpose="batch")] == [other]
        assert any(b"a secret that nobody" in file.read_bytes() for file in tmp_path.iterdir())
        assert (await client.files.delete(made.id)).deleted
        assert not any(b"a secret that nobody" in file.read_bytes() for file in tmp_path.iterdir())
        for call in (client.files.retrieve, client.files.delete, client.files.content):
            with pytest.raises(openai.NotFoundError, match="file"):
                await call(made.id)
        with pytest.raises(openai.BadRequestError, match=f"file must have at most {len(content)} bytes"):
            await uploaded(client, content + b"x")
        with pytest.raises(openai.BadRequestError, match="purpose must be one of"):
            await client.files.create(file=b"x", purpose="fun")
        assert [one.id async for one in client.files.list()] == [other]
        await wrong_forms(place)


async def wrong_forms(place: Site) -> None:
    path = f"http://{place.router.http_address}/v1/files"
    part = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    file = part % (b"file", b'; filename="x"', b"content")
    end = b"--b--\r\n"
    for content, param in (
        (b"nothing", "body"),
        (file, "body"),
        (part % (b"purpose", b"", b"batch") + end, "file"),
        (file + file + end, "file"),
        (part % (b"purpose", b"", b"x" * 5000) + end, "purpose"),
        (b"".join(part % (b"f%d" % number, b"", b"x") for number in range(40)) + end, "body"),
        (b"--b\r\n" + b"A: " + b"x" * 10_000 + b"\r\n\r\n" + end, "body"),
    ):
        async with httpx2.AsyncClient() as client:
            headers = {"content-type": "multipart/form-data; boundary=b"}
            answer = await client.post(path, content=content, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), content[:80]
    async with httpx2.AsyncClient() as client:
        assert (await client.post(path, content=b"{}", headers={"content-type": "application/json"})).status_code == 415
        evil = {"content-type": "multipart/form-data; boundary=b", "origin": "https://evil.example"}
        assert (await client.post(path, content=file + end, headers=evil)).status_code == 403


@on_a_loop
async def test_tenants_are_apart(tmp_path):
    headers = {TENANT: "a"}
    async with storing(tmp_path) as (_, client):
        mine = client.with_options(default_headers=headers)
        file_id = await uploaded(mine, text_of([line("a")]))
        made = await mine.batches.create(input_file_id=file_id, endpoint=CHATS, completion_window="24h")
        over = await until_over(mine, made.id)
        assert await results(mine, over.output_file_id)
        for call in (
            client.files.retrieve(file_id),
            client.files.content(over.output_file_id),
            client.files.delete(over.output_file_id),
            client.batches.retrieve(made.id),
            client.batches.cancel(made.id),
            client.batches.create(input_file_id=file_id, endpoint=CHATS, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert [one async for one in client.files.list()] == [one async for one in client.batches.list()] == []
    async with storing(None) as (_, client):
        with pytest.raises(openai.BadRequestError, match="--store"):
            await uploaded(client, b"{}")


@on_a_loop
async def test_lines_have_the_tenant_and_the_models_of_their_key(tmp_path):
    replica = await FakeReplica.start()
    keys = locked(key_of("a", max_priority="low"), key_of("b", models=["another"]))
    async with site(replica, config=RouterConfig(max_reconnect_s=0.1, store=str(tmp_path)), http=True, **keys) as place:
        url = f"http://{place.router.http_address}/v1"
        a, b = (openai.AsyncOpenAI(base_url=url, api_key=secret_of(name), max_retries=0) for name in ("a", "b"))
        texts = [line("x", "/v1/completions", prompt="hello")]
        over = await until_over(a, (await submitted(a, texts, endpoint="/v1/completions")).id)
        assert over.request_counts.completed == 1
        assert {submit.tenant for submit in replica.submits} == {"a"}
        refused = await submitted(b, texts, endpoint="/v1/completions")
        assert [one.code for one in refused.errors.data] == ["model_not_found"]
        with pytest.raises(openai.NotFoundError):
            await b.batches.retrieve(over.id)
        for client in (a, b):
            await client.close()


@on_a_loop
async def test_the_store_is_part_of_the_metrics_and_of_the_status(tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "_FIGURES_LAST_S", 0.0)
    async with storing(tmp_path, batch_concurrency=2) as (place, client):
        empty = await scraped(place)
        assert (empty["store_bytes",], empty["store_oldest_job_seconds",], empty["store_max_bytes",]) == (0, 0, 2**30)
        place.replicas[0].pause()
        made = await submitted(client, [line(str(number)) for number in range(5)])
        async with asyncio.timeout(10):
            while len(place.replicas[0].submits) < 2:
                await asyncio.sleep(0.01)
        found = await scraped(place)
        assert (found["store_jobs", "line", "running"], found["store_jobs", "line", "waiting"]) == (2, 3)
        assert (found["store_objects", "file"], found["store_objects", "batch"]) == (1, 1)
        assert found["store_bytes",] > 2 * len(text_of([line("0")] * 5))
        assert found["store_oldest_job_seconds",] > 0
        async with AsyncClient(place.router.address) as own:
            load, models = await own.get_load(), await own.list_models()
        assert (load.store.num_jobs_running, load.store.num_jobs_waiting) == (2, 3)
        (told,) = [text for text, _ in _router_lines(RouterStatus("here", load, models)) if "store" in text]
        assert re.match(r"  store: 4 objects, .* of 1 GiB; 2 background jobs running, 3 waiting, the oldest", told)
        place.replicas[0].resume()
        await until_over(client, made.id)
        assert (await scraped(place))["store_jobs", "line", "running"] == 0
    async with storing(None) as (place, client):
        assert ("store_bytes",) not in await scraped(place)


@on_a_loop
async def test_a_line_that_meets_a_fault_of_ours_is_an_error_and_the_others_go_on(tmp_path, monkeypatch):
    real = batch_lines._content
    monkeypatch.setattr(batch_lines, "_content", lambda body: 1 / 0 if body["seed"] == 7 else real(body))
    async with storing(tmp_path) as (_, client):
        over = await until_over(client, (await submitted(client, [line("a", seed=7), line("b")])).id)
        assert (over.status, over.request_counts.failed, over.request_counts.completed) == ("completed", 1, 1)
        (wrong,) = await results(client, over.error_file_id)
        assert "internal error (ZeroDivisionError)" in wrong["response"]["body"]["error"]["message"]
