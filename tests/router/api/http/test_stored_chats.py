"""Chat completions that are stored, as OpenAI's client uses them."""

import openai
import pytest

from holdfast.router.api.http.request_reader import TENANT
from tests.loops import on_a_loop
from tests.router.answers import without_times
from tests.router.api.http.test_stored_responses import storing

ASKED = {"model": "fake", "max_tokens": 6, "seed": 5, "messages": [{"role": "user", "content": "hello"}]}


async def ids_of(client: openai.AsyncOpenAI, **query: object) -> list[str]:
    return [one.id async for one in client.chat.completions.list(**query)]


@pytest.mark.parametrize("n", [1, 2])
@on_a_loop
async def test_a_stream_is_stored_as_the_whole_answer_that_it_comes_to(tmp_path, n):
    async with storing(tmp_path) as (_, client):
        whole = await client.chat.completions.create(store=True, n=n, extra_body={"request_id": "same"}, **ASKED)
        first = await client.chat.completions.retrieve(whole.id)
        assert first.model_dump(exclude_none=True).items() >= whole.model_dump(exclude_none=True).items()
        stream = await client.chat.completions.create(
            store=True, n=n, stream=True, extra_body={"request_id": "same"}, **ASKED
        )
        chunks = [chunk async for chunk in stream]
        again = await client.chat.completions.retrieve(chunks[0].id)
        assert again.choices == whole.choices
        assert (without_times(again.usage.model_dump()), again.id) == (
            without_times(whole.usage.model_dump()),
            whole.id,
        )


@on_a_loop
async def test_they_are_listed_by_model_and_metadata_read_changed_and_deleted(tmp_path):
    async with storing(tmp_path) as (_, client):
        made = [
            await client.chat.completions.create(store=True, metadata={"of": of, "n": str(number)}, **ASKED)
            for number, of in enumerate(("a", "b", "a"))
        ]
        await client.chat.completions.create(**ASKED)
        ids = [one.id for one in made]
        assert await ids_of(client) == await ids_of(client, limit=1) == ids
        assert await ids_of(client, order="desc") == ids[::-1]
        assert await ids_of(client, metadata={"of": "a"}) == [ids[0], ids[2]]
        assert await ids_of(client, metadata={"of": "a", "n": "2"}, model="fake") == ids[2:]
        assert await ids_of(client, model="another") == []
        assert await ids_of(client, after=ids[0]) == ids[1:]
        changed = await client.chat.completions.update(ids[0], metadata={"of": "c"})
        assert changed.metadata == {"of": "c"}
        assert await ids_of(client, metadata={"of": "c"}) == ids[:1]
        (message,) = [one async for one in client.chat.completions.messages.list(ids[0])]
        assert (message.role, message.content) == ("user", "hello")
        assert (await client.chat.completions.delete(ids[0])).deleted
        for call in (client.chat.completions.retrieve, client.chat.completions.delete):
            with pytest.raises(openai.NotFoundError, match="chat completion"):
                await call(ids[0])
        with pytest.raises(openai.BadRequestError, match="after must be the id"):
            await ids_of(client, after=ids[0])


@on_a_loop
async def test_tenants_are_apart_and_kinds_of_objects_too(tmp_path):
    async with storing(tmp_path) as (_, client):
        made = await client.chat.completions.create(store=True, extra_headers={TENANT: "a"}, **ASKED)
        assert await ids_of(client) == []
        for call in (
            client.chat.completions.retrieve(made.id),
            client.chat.completions.update(made.id, metadata={}),
            client.chat.completions.delete(made.id),
            client.chat.completions.messages.list(made.id),
            client.responses.retrieve(made.id, extra_headers={TENANT: "a"}),
            client.conversations.retrieve(made.id, extra_headers={TENANT: "a"}),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError, match="metadata must have at most 16 keys"):
            await client.chat.completions.create(store=True, metadata={str(n): "" for n in range(17)}, **ASKED)
    async with storing(None) as (_, client):
        assert (await client.chat.completions.create(store=True, **ASKED)).choices
        assert await ids_of(client) == []
