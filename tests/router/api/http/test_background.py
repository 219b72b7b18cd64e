"""Background responses as OpenAI's client uses them: computed without a client, and continued by another router."""

import asyncio
import gc
from itertools import pairwise

import openai
import pytest

from holdfast.router.api.http import background
from holdfast.router.api.http.request_reader import TENANT
from holdfast.router.config import RouterConfig
from holdfast.router.store.job_store import JobStore
from holdfast.router.wire.resume_codec import MARK
from holdfast.worker.errors import StoreError
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.http.test_stored_responses import SHORT, storing
from tests.router.api.test_keys_by_api import locked
from tests.router.security.test_gate import key_of, secret_of
from tests.router.site import site

LONG = {"model": "fake", "max_output_tokens": 60, "extra_body": {"seed": 5, "request_id": "same"}}


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(background, "CLAIM_EVERY_S", 0.02)


async def until_over(client: openai.AsyncOpenAI, response_id: str, **options):
    async with asyncio.timeout(20):
        while (found := await client.responses.retrieve(response_id, **options)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    return found


async def events_of(client: openai.AsyncOpenAI, response_id: str, after: int | None = None) -> list:
    more = {} if after is None else {"starting_after": after}
    return [event async for event in await client.responses.retrieve(response_id, stream=True, **more)]


async def check_replays(tmp_path):
    async with storing(tmp_path) as (_, client):
        waited_for = await client.responses.create(input="hello", **LONG)
        await client.responses.delete(waited_for.id)
        queued = await client.responses.create(input="hello", background=True, **LONG)
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        made = await until_over(client, queued.id)
        assert made.output_text == waited_for.output_text
        events = await events_of(client, queued.id)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == made.output_text
        assert events[-1].response == made
        for after in (0, 1, len(events) // 2, len(events) - 2, len(events) - 1):
            assert await events_of(client, queued.id, after) == events[after + 1 :]
        follows = await client.responses.create(input="more", previous_response_id=queued.id, **SHORT)
        assert follows.status == "incomplete"


@on_a_loop
async def test_it_is_the_response_that_a_client_that_waits_gets_and_its_events_are_replayed(tmp_path):
    await check_replays(tmp_path)


@on_a_loop
async def test_planted_a_replay_that_skips_an_event_is_found(tmp_path, monkeypatch):
    events_after = background._events_after
    monkeypatch.setattr(background, "_events_after", lambda piece, after: events_after(piece, after + 1))
    with pytest.raises(AssertionError):
        await check_replays(tmp_path)


@on_a_loop
async def test_a_stream_of_it_may_be_left_and_joined_again(tmp_path):
    async with storing(tmp_path) as (place, client):
        stream = await client.responses.create(input="hello", background=True, stream=True, **LONG)
        first = [await anext(stream) for _ in range(3)]
        await stream.close()
        rest = await events_of(client, first[0].response.id, first[-1].sequence_number)
        numbers = [event.sequence_number for event in [*first, *rest]]
        assert numbers == list(range(len(numbers)))
        assert rest[-1].type == "response.incomplete"
        await place.until_idle()


@on_a_loop
async def test_another_router_goes_on_where_the_first_one_has_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "STORE_EVERY_S", 0.01)
    async with storing(tmp_path / "whole") as (_, client):
        whole = await until_over(client, (await client.responses.create(input="hello", background=True, **LONG)).id)
    async with storing(tmp_path / "cut") as (place, client):
        place.replicas[0].step_s = 0.02
        made = await client.responses.create(input="hello", background=True, stream=True, **LONG)
        async for event in made:
            if event.type == "response.output_text.delta" and event.sequence_number > 8:
                break
        response_id = whole.id
        await place.router.stop()
    async with storing(tmp_path / "cut") as (place, client):
        found = await until_over(client, response_id)
        assert found.output == whole.output
        assert len(place.replicas[0].submits[-1].output_token_ids) > 0, "it was begun anew"
        events = await events_of(client, response_id)
        assert all(after.sequence_number == before.sequence_number + 1 for before, after in pairwise(events))
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert "".join(event.delta for event in deltas) == whole.output_text
        assert [event.type for event in events].count("response.created") == 1


@on_a_loop
async def test_a_router_that_stops_while_it_stores_leaves_no_gap(tmp_path, monkeypatch):
    """The piece that it was storing is stored before the one after it."""
    monkeypatch.setattr(background, "STORE_EVERY_S", 0.01)
    add, is_storing, may_store = JobStore.add, asyncio.Event(), asyncio.Event()

    async def add_late(self, job, piece, response=None):
        if b"output_text.delta" in piece:
            is_storing.set()
            await may_store.wait()
        return await add(self, job, piece, response)

    async with storing(tmp_path) as (place, client):
        place.replicas[0].step_s = 0.02
        made = await client.responses.create(input="hello", background=True, **LONG)
        monkeypatch.setattr(JobStore, "add", add_late)
        await is_storing.wait()
        stopping = asyncio.create_task(place.router.stop())
        while not any(task.get_name() == "background response" and task.cancelling() for task in asyncio.all_tasks()):
            await asyncio.sleep(0.005)
        may_store.set()
        await stopping
    monkeypatch.setattr(JobStore, "add", add)
    async with storing(tmp_path) as (place, client):
        found = await until_over(client, made.id)
        assert found.output_text
        assert place.replicas[0].submits[-1].output_token_ids, "it was begun anew"
        events = await events_of(client, made.id)
        assert all(after.sequence_number == before.sequence_number + 1 for before, after in pairwise(events))


@on_a_loop
async def test_a_stored_stream_with_a_gap_fails_and_is_not_left_open(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "STORE_EVERY_S", 0.01)
    add, marks = JobStore.add, []

    def is_lost(part: bytes) -> bool:
        if part.startswith(MARK):
            marks.append(part)
        return part.startswith(MARK) and len(marks) == 3

    async def lose_one(self, job, piece, response=None):
        kept = [part for part in piece.split(b"\n\n") if not is_lost(part)]
        return await add(self, job, b"\n\n".join(kept), response)

    async with storing(tmp_path) as (place, client):
        monkeypatch.setattr(JobStore, "add", lose_one)
        place.replicas[0].step_s = 0.02
        made = await client.responses.create(input="hello", background=True, stream=True, **LONG)
        async for event in made:
            if len(marks) > 5:
                break
            if event.type == "response.created":
                response_id = event.response.id
        await place.router.stop()
    monkeypatch.setattr(JobStore, "add", add)
    async with storing(tmp_path) as (_, client):
        found = await until_over(client, response_id)
        assert found.status == "failed"
        assert "has a gap" in found.error.message


@on_a_loop
async def test_a_fault_of_ours_while_claiming_ends_no_claims(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "MAX_RUNNING", 0)  # it is only queued
    async with storing(tmp_path) as (_, client):
        made = await client.responses.create(input="hello", background=True, **LONG)
    monkeypatch.setattr(background, "MAX_RUNNING", 8)
    claim, failures = JobStore.claim, []

    async def failing_once(self, *arguments, **named):
        if not failures:
            failures.append(RuntimeError("a bug"))
            raise failures[0]
        return await claim(self, *arguments, **named)

    monkeypatch.setattr(JobStore, "claim", failing_once)
    async with storing(tmp_path) as (_, client):
        assert (await until_over(client, made.id)).output_text
    assert failures


@on_a_loop
async def test_it_is_cancelled_and_its_replica_is_told(tmp_path):
    async with storing(tmp_path) as (place, client):
        place.replicas[0].pause()
        made = await client.responses.create(input="hello", background=True, **LONG)
        cancelled = await client.responses.cancel(made.id)
        assert cancelled.status == "cancelled"
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        place.replicas[0].resume()
        await place.until_idle()
        assert [event.type for event in await events_of(client, made.id)][-1:] != ["response.completed"]


@on_a_loop
async def test_a_request_that_fails_says_so_in_its_object_and_its_stream(tmp_path):
    async with storing(tmp_path) as (_, client):
        made = await client.responses.create(
            input="hello", background=True, extra_body={"timeout": 0.001}, model="fake"
        )
        failed = await until_over(client, made.id)
        assert (failed.status, failed.error.code) == ("failed", "deadline_exceeded")
        assert [event.type for event in await events_of(client, made.id)][-1] == "response.failed"


@on_a_loop
async def test_tenants_are_apart_and_what_cannot_be_is_refused_by_name(tmp_path):
    async with storing(tmp_path) as (_, client):
        headers = {TENANT: "a"}
        made = await client.responses.create(input="hello", background=True, extra_headers=headers, **SHORT)
        for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        await until_over(client, made.id, extra_headers=headers)
        with pytest.raises(openai.BadRequestError, match="must come with store = true"):
            await client.responses.create(input="x", background=True, store=False, **SHORT)
        plain = await client.responses.create(input="hello", **SHORT)
        with pytest.raises(openai.BadRequestError, match="only events of background responses"):
            await events_of(client, plain.id)
        with pytest.raises(openai.BadRequestError, match="must be a background response"):
            await client.responses.cancel(plain.id)
    async with storing(None) as (_, client):
        with pytest.raises(openai.BadRequestError, match="--store"):
            await client.responses.create(input="hello", background=True, **SHORT)


@on_a_loop
async def test_keys_see_the_responses_of_their_own_tenant_also_those_made_in_the_background(tmp_path):
    replica = await FakeReplica.start()
    config = RouterConfig(max_reconnect_s=0.1, store=str(tmp_path))
    keys = locked(key_of("a"), key_of("b"), key_of("low", max_priority="low"))
    async with site(replica, config=config, http=True, **keys) as place:
        url = f"http://{place.router.http_address}/v1"
        a, b, low = (
            openai.AsyncOpenAI(base_url=url, api_key=secret_of(name), max_retries=0) for name in ("a", "b", "low")
        )
        plain = await a.responses.create(input="hello", **SHORT)
        made = await a.responses.create(input="hello", background=True, **SHORT)
        assert (await until_over(a, made.id)).output_text == plain.output_text
        assert {submit.tenant for submit in replica.submits} == {"a"}
        for response_id in (plain.id, made.id):
            for call in (b.responses.retrieve, b.responses.delete, b.responses.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    await call(response_id)
            with pytest.raises(openai.PermissionDeniedError):
                await b.responses.retrieve(response_id, extra_headers={TENANT: "a"})
        with pytest.raises(openai.PermissionDeniedError, match="low at most"):
            await low.responses.create(input="hello", background=True, **SHORT)
        for client in (a, b, low):
            await client.close()


@on_a_loop
async def test_its_tokens_are_charged_to_the_key_that_asked_for_it(tmp_path):
    replica = await FakeReplica.start()
    config = RouterConfig(max_reconnect_s=0.1, store=str(tmp_path))
    async with (
        site(replica, config=config, http=True, **locked(key_of("a", tokens_per_minute=6), key_of("b"))) as place,
        openai.AsyncOpenAI(
            base_url=f"http://{place.router.http_address}/v1", api_key=secret_of("a"), max_retries=0
        ) as client,
    ):
        made = await client.responses.create(input="hello", background=True, **LONG)
        assert (await until_over(client, made.id)).status == "incomplete"
        await place.until_idle()
        with pytest.raises(openai.RateLimitError, match="tokens_per_minute") as refused:
            await client.responses.create(input="hello", **SHORT)
        assert int(refused.value.response.headers["retry-after"]) > 600, "60 tokens of its output at 6 a minute"


@on_a_loop
async def test_a_store_that_fails_while_a_job_is_handed_over_is_a_warning(tmp_path, monkeypatch, caplog):
    async def failing(*_: object) -> None:
        raise StoreError("the disk is full")

    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    async with storing(tmp_path) as (place, client):
        place.replicas[0].pause()
        made = await client.responses.create(input="hello", background=True, **LONG)
        monkeypatch.setattr(JobStore, "release", failing)
        monkeypatch.setattr(background, "MAX_RUNNING", 0)
        waits = await client.responses.create(input="hello", background=True, **LONG | {"extra_body": {"seed": 6}})
        assert (made.status, waits.status) == ("queued", "queued")
        await place.router.stop()
    gc.collect()
    assert not unhandled
    assert [record.message for record in caplog.records if "the disk is full" in record.message] == [
        "a background response cannot be put back: the disk is full"
    ] * 2
