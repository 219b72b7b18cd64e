"""Every call of the SDKs to stored objects: a method that an SDK gains has to be played here, or listed as absent."""

import inspect
from typing import Any

import openai
import pytest
from anthropic.resources.messages import AsyncBatches as MessageBatches
from anthropic.resources.messages import AsyncMessages as AnthropicMessages
from openai.resources.batches import AsyncBatches
from openai.resources.chat.completions import AsyncCompletions
from openai.resources.chat.completions.messages import AsyncMessages
from openai.resources.conversations.conversations import AsyncConversations
from openai.resources.conversations.items import AsyncItems
from openai.resources.files import AsyncFiles
from openai.resources.responses.input_items import AsyncInputItems
from openai.resources.responses.input_tokens import AsyncInputTokens
from openai.resources.responses.responses import AsyncResponses

from tests.loops import on_a_loop
from tests.router.api.http.test_batches import line, submitted, until_over, uploaded
from tests.router.api.http.test_message_batches import asked, until_ended
from tests.router.api.http.test_messages_and_responses import claude
from tests.router.api.http.test_stored_chats import ASKED
from tests.router.api.http.test_stored_responses import SHORT, prompt_of, storing

RESOURCES = (
    *(AsyncResponses, AsyncInputItems, AsyncInputTokens, AsyncConversations, AsyncItems, AsyncCompletions),
    *(AsyncMessages, AsyncFiles, AsyncBatches, AnthropicMessages, MessageBatches),
)
ABSENT = {
    "AsyncResponses.compact",  # its answer is encrypted for OpenAI's models
    "AsyncResponses.connect",  # a WebSocket
    "AsyncFiles.retrieve_content",  # the old name of `content`
}


@pytest.fixture
def called(monkeypatch) -> set[str]:
    """Names of the methods that are called."""
    names: set[str] = set()

    def watched(name: str, method: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            names.add(name)
            return method(*arguments, **named)

        return call

    for resource in RESOURCES:
        for name, method in public_methods(resource):
            full_name = full(resource, name)
            monkeypatch.setattr(resource, name, watched(full_name, method))
    return names


def public_methods(resource: type) -> list[tuple[str, Any]]:
    return [(name, one) for name, one in inspect.getmembers(resource, inspect.isfunction) if not name.startswith("_")]


def full(resource: type, name: str) -> str:
    owner = resource.__name__ if resource.__module__.startswith("openai") else f"anthropic.{resource.__name__}"
    return f"{owner}.{name}"


async def play_responses(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(input="hello", **SHORT)
    assert (await client.responses.parse(input="hello", **SHORT)).output_text == first.output_text
    async with client.responses.stream(input="hello", model="fake", max_output_tokens=6) as stream:
        assert [event async for event in stream][-1].type == "response.incomplete"
    assert await client.responses.retrieve(first.id) == first
    assert [one.type async for one in client.responses.input_items.list(first.id)] == ["message"]
    later = await client.responses.create(input="more", background=True, **SHORT)
    assert (await client.responses.cancel(later.id)).status in ("cancelled", "incomplete")
    assert await client.responses.delete(first.id) is None


async def play_conversations(client: openai.AsyncOpenAI) -> None:
    said = [{"type": "message", "role": "user", "content": "I am Ann."}]
    made = await client.conversations.create(items=said, metadata={"a": "b"})
    assert (await client.conversations.retrieve(made.id)).metadata == {"a": "b"}
    assert (await client.conversations.update(made.id, metadata={"a": "c"})).metadata == {"a": "c"}
    (added,) = (await client.conversations.items.create(made.id, items=said)).data
    assert (await client.conversations.items.retrieve(added.id, conversation_id=made.id)).id == added.id
    assert len([one async for one in client.conversations.items.list(made.id)]) == 2
    await client.conversations.items.delete(added.id, conversation_id=made.id)
    assert (await client.conversations.delete(made.id)).deleted


async def play_chats(client: openai.AsyncOpenAI) -> None:
    made = await client.chat.completions.create(store=True, **ASKED)
    with pytest.raises(openai.LengthFinishReasonError) as cut:
        await client.chat.completions.parse(**ASKED)
    assert cut.value.completion.choices[0].message.content == made.choices[0].message.content
    with pytest.raises(openai.LengthFinishReasonError):
        async with client.chat.completions.stream(**ASKED) as stream:
            await stream.get_final_completion()
    assert (await client.chat.completions.retrieve(made.id)).id == made.id
    assert (await client.chat.completions.update(made.id, metadata={"of": "c"})).metadata == {"of": "c"}
    assert [one.id async for one in client.chat.completions.list()] == [made.id]
    assert len([one async for one in client.chat.completions.messages.list(made.id)]) == 1
    assert (await client.chat.completions.delete(made.id)).deleted


async def play_files_and_batches(client: openai.AsyncOpenAI) -> None:
    file_id = await uploaded(client, b"{}\n")
    assert (await client.files.wait_for_processing(file_id, poll_interval=0.01)).status == "processed"
    assert (await client.files.retrieve(file_id)).id == file_id
    assert [one.id async for one in client.files.list()] == [file_id]
    assert (await client.files.content(file_id)).text == "{}\n"
    assert (await client.files.delete(file_id)).deleted
    batch = await submitted(client, [line("a")])
    await until_over(client, batch.id)
    assert [one.id async for one in client.batches.list()] == [batch.id]
    assert (await client.batches.cancel(batch.id)).status == "completed"


async def play_messages(client: Any) -> None:
    body = {**asked("a")["params"], "extra_body": {"seed": 5}}
    made = await client.messages.create(**body)
    assert (await client.messages.parse(**body)).content[0].text == made.content[0].text
    async with client.messages.stream(**body) as stream:
        assert (await stream.get_final_message()).content[0].text == made.content[0].text
    counted = await client.messages.count_tokens(model="fake", messages=body["messages"])
    assert counted.input_tokens == made.usage.input_tokens
    batch = await client.messages.batches.create(requests=[asked("a")])
    await client.messages.batches.cancel(batch.id)
    await until_ended(client, batch.id)
    assert [one.custom_id async for one in await client.messages.batches.results(batch.id)] == ["a"]
    assert [one.id async for one in client.messages.batches.list()] == [batch.id]
    assert (await client.messages.batches.delete(batch.id)).id == batch.id


@on_a_loop
async def test_every_call_of_the_sdks_is_answered(tmp_path, called):
    async with storing(tmp_path) as (place, client), claude(place) as anthropic_client:
        await play_responses(client)
        await play_conversations(client)
        await play_chats(client)
        await play_files_and_batches(client)
        await play_messages(anthropic_client)
        await client.responses.input_tokens.count(model="fake", input="hello")
    every = {full(resource, name) for resource in RESOURCES for name, _ in public_methods(resource)}
    assert every - called == ABSENT


@on_a_loop
async def test_counted_input_is_the_prompt_that_the_response_has(tmp_path):
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    async with storing(tmp_path) as (place, client):
        first = await client.responses.create(input="one", **SHORT)
        asked_for = {"model": "fake", "input": "two", "previous_response_id": first.id}
        for more in ({}, {"instructions": "be kind"}, {"tools": [tool]}):
            counted = await client.responses.input_tokens.count(**asked_for, **more)
            made = await client.responses.create(**asked_for, **more, max_output_tokens=6)
            assert counted.object == "response.input_tokens"
            assert counted.input_tokens == made.usage.input_tokens == len(prompt_of(place))
        num_sent = len(place.replicas[0].submits)
        with pytest.raises(openai.BadRequestError, match="must be stored"):
            await client.responses.input_tokens.count(model="fake", input="x", previous_response_id="resp_none")
        assert len(place.replicas[0].submits) == num_sent, "counting computes nothing"
