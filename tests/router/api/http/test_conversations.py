"""Stored conversations as OpenAI's client uses them: items in order, turns that are added whole, tenants apart."""

import asyncio

import openai
import pytest

from holdfast.router.api.http import background
from holdfast.router.api.http.request_reader import TENANT
from holdfast.router.config import LimitsConfig
from holdfast.router.store.conversation_store import ConversationStore
from tests.loops import on_a_loop
from tests.router.api.http.test_background import LONG, until_over
from tests.router.api.http.test_stored_responses import SHORT, prompt_of, storing


def user(text: str, **more: str) -> dict[str, object]:
    return {"type": "message", "role": "user", "content": text, **more}


async def texts_of(client: openai.AsyncOpenAI, conversation_id: str) -> list[str]:
    found = client.conversations.items.list(conversation_id, order="asc", limit=100)
    return [item.content[0].text async for item in found]


@on_a_loop
async def test_items_are_added_listed_read_and_deleted_for_good(tmp_path):
    async with storing(tmp_path) as (_, client):
        made = await client.conversations.create(items=[user("one"), user("two")], metadata={"of": "tests"})
        assert (await client.conversations.retrieve(made.id)).metadata == {"of": "tests"}
        changed = await client.conversations.update(made.id, metadata={"of": "others"})
        assert (changed.metadata, changed.created_at) == ({"of": "others"}, made.created_at)
        added = await client.conversations.items.create(made.id, items=[user("a secret that nobody else has", id="x")])
        assert [item.id for item in added.data] == ["x"]
        assert await texts_of(client, made.id) == ["one", "two", "a secret that nobody else has"]
        page = await client.conversations.items.list(made.id, limit=2)
        assert ([item.content[0].text for item in page.data][1:], page.has_more) == (["two"], True)
        rest = await client.conversations.items.list(made.id, after=page.data[-1].id)
        assert [item.content[0].text for item in rest.data] == ["one"]
        assert (await client.conversations.items.retrieve("x", conversation_id=made.id)).content[0].text[
            :8
        ] == "a secret"
        with pytest.raises(openai.BadRequestError, match="ids that no item"):
            await client.conversations.items.create(made.id, items=[user("again", id="x")])
        assert any(b"a secret that nobody" in file.read_bytes() for file in tmp_path.iterdir())
        await client.conversations.items.delete("x", conversation_id=made.id)
        assert not any(b"a secret that nobody" in file.read_bytes() for file in tmp_path.iterdir())
        with pytest.raises(openai.NotFoundError, match="item 'x'"):
            await client.conversations.items.retrieve("x", conversation_id=made.id)
        assert (await client.conversations.delete(made.id)).deleted
        for call in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
            with pytest.raises(openai.NotFoundError, match="conversation"):
                await call(made.id)
        assert not any(b"two" in file.read_bytes() for file in tmp_path.iterdir())


@on_a_loop
async def test_turns_go_on_from_a_conversation_and_are_added_to_it(tmp_path):
    async with storing(tmp_path) as (place, client):
        made = await client.conversations.create(items=[user("one")])
        first = await client.responses.create(input="two", conversation=made.id, **SHORT)
        assert prompt_of(place) == "<user>one<user>two<a>"
        assert first.conversation.id == made.id
        stream = await client.responses.create(input="three", conversation={"id": made.id}, stream=True, **SHORT)
        second = [event async for event in stream][-1].response
        said = f"<user>one<user>two<assistant>{first.output_text}<user>three"
        assert prompt_of(place) == f"{said}<a>"
        unkept = await client.responses.create(input="four", conversation=made.id, store=False, **SHORT)
        queued = await client.responses.create(input="five", conversation=made.id, background=True, **SHORT)
        last = await until_over(client, queued.id)
        assert (
            prompt_of(place)
            == f"{said}<assistant>{second.output_text}<user>four<assistant>{unkept.output_text}<user>five<a>"
        )
        outputs = [one.output_text for one in (first, second, unkept, last)]
        turns = zip(("two", "three", "four", "five"), outputs, strict=True)
        assert await texts_of(client, made.id) == ["one", *(text for turn in turns for text in turn)]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)


@on_a_loop
async def test_two_turns_at_once_are_added_whole_in_the_order_of_their_ends(tmp_path):
    async with storing(tmp_path) as (place, client):
        made = await client.conversations.create()
        place.replicas[0].pause()
        first = asyncio.create_task(client.responses.create(input="first", conversation=made.id, **SHORT))
        async with asyncio.timeout(10):
            while not place.replicas[0].submits:
                await asyncio.sleep(0.01)
        second = asyncio.create_task(client.responses.create(input="second", conversation=made.id, **SHORT))
        async with asyncio.timeout(10):
            while len(place.replicas[0].submits) < 2:
                await asyncio.sleep(0.01)
        assert prompt_of(place) == "<user>second<a>"
        place.replicas[0].resume()
        answers = {"first": (await first).output_text, "second": (await second).output_text}
        found = await texts_of(client, made.id)
        assert sorted(found[::2]) == ["first", "second"]
        assert [answers[name] for name in found[::2]] == found[1::2]


@on_a_loop
async def test_a_background_turn_goes_on_from_what_it_has_read_whatever_was_added_since(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "STORE_EVERY_S", 0.01)
    monkeypatch.setattr(background, "CLAIM_EVERY_S", 0.01)
    async with storing(tmp_path) as (place, client):
        made = await client.conversations.create(items=[user("one", id="x")])
        place.replicas[0].step_s = 0.02
        turn = {**LONG, "input": "two", "conversation": made.id}
        stream = await client.responses.create(background=True, stream=True, **turn)
        async for event in stream:
            if event.type == "response.output_text.delta" and event.sequence_number > 8:
                break
        await client.conversations.items.create(made.id, items=[user("between")])
        await client.conversations.items.delete("x", conversation_id=made.id)
        await place.router.stop()
    async with storing(tmp_path) as (place, client):
        over = await until_over(client, "resp_same")
        assert prompt_of(place) == "<user>one<user>two<a>"
        assert place.replicas[0].submits[-1].output_token_ids, "it was begun anew"
        assert await texts_of(client, made.id) == ["between", "two", over.output_text]


@on_a_loop
async def test_a_turn_whose_conversation_is_deleted_is_answered_all_the_same(tmp_path):
    async with storing(tmp_path) as (place, client):
        made = await client.conversations.create()
        place.replicas[0].pause()
        answer = asyncio.create_task(client.responses.create(input="first", conversation=made.id, **SHORT))
        async with asyncio.timeout(10):
            while not place.replicas[0].submits:
                await asyncio.sleep(0.01)
        await client.conversations.delete(made.id)
        place.replicas[0].resume()
        assert (await answer).output_text


@on_a_loop
async def test_a_turn_and_its_items_are_stored_together_or_not_at_all(tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise AssertionError("the process has ended")

    async with storing(tmp_path) as (_, client):
        made = await client.conversations.create(items=[user("one")])
        monkeypatch.setattr(ConversationStore, "append_if_there", fail)
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(
                input="two", conversation=made.id, **SHORT | {"extra_body": {"seed": 5, "request_id": "r"}}
            )
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_r")
        assert await texts_of(client, made.id) == ["one"]


@on_a_loop
async def test_tenants_are_apart_and_what_cannot_be_is_refused_by_name(tmp_path):
    async with storing(tmp_path) as (_, client):
        made = await client.conversations.create(items=[user("one", id="x")], extra_headers={TENANT: "a"})
        items = client.conversations.items
        for call in (
            client.conversations.retrieve(made.id),
            client.conversations.update(made.id, metadata={}),
            client.conversations.delete(made.id),
            items.list(made.id),
            items.retrieve("x", conversation_id=made.id),
            items.create(made.id, items=[user("y")]),
            items.delete("x", conversation_id=made.id),
            client.responses.create(input="x", conversation=made.id, **SHORT),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        for call, reason in (
            (client.conversations.create(metadata={"a": "x" * 513}), "metadata.a must be text of at most 512"),
            (client.conversations.create(items=[user("x")] * 21), "items must be at most 20"),
            (client.conversations.create(items=[{"type": "computer_call"}]), r"items\[0\].type must be"),
            (client.responses.create(input="x", conversation={"id": 7}, **SHORT), "conversation must be an id"),
            (
                client.responses.create(input="x", conversation="conv_1", previous_response_id="resp_1", **SHORT),
                "must not come with previous_response_id",
            ),
        ):
            with pytest.raises(openai.BadRequestError, match=reason):
                await call
    async with storing(None) as (_, client):
        with pytest.raises(openai.BadRequestError, match="--store"):
            await client.conversations.create()


@pytest.mark.parametrize("odd", ["\x00", "ä", ""], ids=ascii)
@on_a_loop
async def test_what_can_be_no_id_is_not_there(tmp_path, odd):
    async with storing(tmp_path) as (_, client):
        made = await client.conversations.create()
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(input="x", conversation=f"{odd}conv_1" if odd else "", **SHORT)
        with pytest.raises(openai.BadRequestError, match="previous_response_id must"):
            await client.responses.create(input="x", previous_response_id=odd, **SHORT)
        with pytest.raises(openai.BadRequestError, match=r"items\[0\].id must"):
            await client.conversations.items.create(made.id, items=[user("x", id=odd)])
        if odd:
            with pytest.raises(openai.NotFoundError):
                await client.conversations.retrieve(f"conv{odd}")
            with pytest.raises(openai.BadRequestError, match="after must"):
                await client.conversations.items.list(made.id, after=odd)


@on_a_loop
async def test_a_conversation_is_bounded(tmp_path):
    async with storing(tmp_path, limits=LimitsConfig(max_message_bytes=2**20)) as (_, client):
        made = await client.conversations.create(items=[user("x" * 500_000)])
        await client.conversations.items.create(made.id, items=[user("x" * 500_000)])
        with pytest.raises(openai.BadRequestError, match="at most 1048576 bytes"):
            await client.conversations.items.create(made.id, items=[user("x" * 50_000)])
        await client.conversations.items.create(made.id, items=[user("x" * 40_000)])
