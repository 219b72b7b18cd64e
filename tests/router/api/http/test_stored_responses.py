"""Stored responses as OpenAI's client uses them: read, listed, deleted and continued, by any router of the store."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from holdfast.router.api.http.request_reader import TENANT
from holdfast.router.config import RouterConfig
from holdfast.router.store.database import Database
from holdfast.router.store.object_store import ObjectStore, StoreLimits
from holdfast.router.store.response_store import ResponseStore
from holdfast.worker.errors import StoreError
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.http.test_openai_sdk import with_template
from tests.router.site import Site, site

SHORT = {"model": "fake", "max_output_tokens": 6, "extra_body": {"seed": 5}}


@asynccontextmanager
async def storing(store: Path | str | None, **options: object) -> AsyncIterator[tuple[Site, openai.AsyncOpenAI]]:
    named = {name: options.pop(name) for name in ("batch_concurrency", "store_max_file_bytes") if name in options}
    config = RouterConfig(max_reconnect_s=0.1, store=None if store is None else str(store), **named)
    async with site(
        await FakeReplica.start(), config=config, load_tokenizer=with_template, http=True, **options
    ) as place:
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        base_url = f"http://{place.router.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0, http_client=plain) as client:
            yield place, client


def prompt_of(place: Site) -> str:
    """Of the last request, as the model has it."""
    return bytes(place.replicas[0].submits[-1].prompt_token_ids).decode()


@on_a_loop
async def test_a_response_is_read_again_from_another_router_and_after_a_restart(tmp_path):
    other = ResponseStore(ObjectStore(await Database.open(str(tmp_path / "store")), StoreLimits()))
    async with storing(tmp_path / "store") as (_, client):
        made = await client.responses.create(input="hello", metadata={"a": "b"}, **SHORT)
        assert made.store
        assert await client.responses.retrieve(made.id) == made
        assert (await other.get("", made.id)).response["output"][0]["content"][0]["text"] == made.output_text
    await other.database.close()
    async with storing(tmp_path / "store") as (_, client):
        assert (await client.responses.retrieve(made.id)).output_text == made.output_text


@on_a_loop
async def test_a_conversation_goes_on_as_if_it_had_been_sent_whole(tmp_path):
    async with storing(tmp_path) as (place, client):
        first = await client.responses.create(input="one", instructions="be kind", **SHORT)
        second = await client.responses.create(input="two", previous_response_id=first.id, **SHORT)
        items = [{"role": "user", "content": "three"}]
        stream = await client.responses.create(input=items, previous_response_id=second.id, stream=True, **SHORT)
        events = [event async for event in stream]
        third = events[-1].response
        before = f"<user>one<assistant>{first.output_text}<user>two<assistant>{second.output_text}"
        assert prompt_of(place) == f"{before}<user>three<a>"
        assert (third.previous_response_id, third.store) == (second.id, True)
        assert await client.responses.retrieve(third.id) == third
        await client.responses.create(input="four", previous_response_id=third.id, store=False, **SHORT)
        assert prompt_of(place).startswith("<user>one<assistant>")


@on_a_loop
async def test_input_items_are_listed_in_pages(tmp_path):
    async with storing(tmp_path) as (_, client):
        parts = [{"type": "input_text", "text": "b"}]
        made = await client.responses.create(
            input=[
                {"role": "user", "content": "a"},
                {"role": "user", "content": parts},
                {"role": "user", "content": "c"},
            ],
            **SHORT,
        )
        newest_first = [item async for item in client.responses.input_items.list(made.id, limit=2)]
        assert [item.content[0].text for item in newest_first] == ["c", "b", "a"]
        page = await client.responses.input_items.list(made.id, order="asc", limit=2)
        assert ([item.content[0].text for item in page.data], page.has_more) == (["a", "b"], True)
        rest = await client.responses.input_items.list(made.id, order="asc", after=page.data[-1].id)
        assert [item.content[0].text for item in rest.data] == ["c"]
        for wrong in ({"limit": 0}, {"order": "up"}, {"after": "x"}):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.input_items.list(made.id, **wrong)
            assert refused.value.param == next(iter(wrong))


@on_a_loop
async def test_what_is_deleted_is_gone_from_the_disk(tmp_path):
    async with storing(tmp_path) as (_, client):
        made = await client.responses.create(input="a secret that nobody else has", **SHORT)
        assert any(b"a secret that nobody" in file.read_bytes() for file in tmp_path.iterdir())
        await client.responses.delete(made.id)
        assert not any(b"a secret that nobody" in file.read_bytes() for file in tmp_path.iterdir())
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="is not stored"):
                await call(made.id)
        with pytest.raises(openai.BadRequestError, match="must be stored") as refused:
            await client.responses.create(input="more", previous_response_id=made.id, **SHORT)
        assert refused.value.param == "previous_response_id"


@on_a_loop
async def test_tenants_are_apart(tmp_path):
    async with storing(tmp_path) as (_, client):
        made = await client.responses.create(input="mine", extra_headers={TENANT: "a"}, **SHORT)
        for headers in ({}, {TENANT: "b"}):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(made.id, extra_headers=headers)
            with pytest.raises(openai.NotFoundError):
                await client.responses.delete(made.id, extra_headers=headers)
            with pytest.raises(openai.BadRequestError):
                await client.responses.create(input="x", previous_response_id=made.id, extra_headers=headers, **SHORT)
        assert (await client.responses.retrieve(made.id, extra_headers={TENANT: "a"})).id == made.id


@on_a_loop
async def test_without_a_store_nothing_is_stored_and_continuing_is_refused_by_name():
    async with storing(None) as (_, client):
        made = await client.responses.create(input="hello", store=True, **SHORT)
        assert made.store is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="--store"):
            await client.responses.create(input="more", previous_response_id=made.id, **SHORT)


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_a_store_that_fails_costs_no_answer_and_is_told(tmp_path, monkeypatch, stream):
    async def fail(self, tenant, stored, *, is_kept):
        raise StoreError("the store failed: database or disk is full")

    monkeypatch.setattr(ResponseStore, "save", fail)
    async with storing(tmp_path) as (place, client):
        made = await client.responses.create(input="hello", stream=stream, **SHORT)
        if stream:
            made = [event async for event in made][-1].response
        assert (made.status, made.store) == ("incomplete", False)
        assert "1 answers could not be stored: the store failed" in place.router._all_warnings()[0]
