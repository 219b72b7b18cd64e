"""Anthropic's own client and OpenAI's responses against a router: whole answers, streams, errors, dying replicas."""

import anthropic
import openai
import pytest

from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.http.test_openai_sdk import HELLO, RENDERED, openai_site, text_of


def claude(place) -> anthropic.AsyncAnthropic:
    plain, url = anthropic.DefaultAsyncHttpxClient(verify=False), f"http://{place.router.http_address}"
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, http_client=plain)


SEED = {"extra_body": {"seed": 4}}


@on_a_loop
async def test_a_message_is_answered_whole_and_its_tokens_are_counted():
    async with openai_site(await FakeReplica.start()) as (place, _), claude(place) as client:
        answer = await client.messages.create(model="fake", max_tokens=6, messages=HELLO, **SEED)
        counted = await client.messages.count_tokens(model="fake", messages=HELLO)
        message = await client.messages.create(
            model="fake", max_tokens=3, system=[{"type": "text", "text": "be"}], messages=HELLO, **SEED
        )
    assert [block.text for block in answer.content] == [text_of(RENDERED, 4, 6)]
    assert (answer.stop_reason, answer.usage.input_tokens, answer.usage.output_tokens) == ("max_tokens", 14, 6)
    assert counted.input_tokens == 14
    assert message.content[0].text == text_of(b"<system>be<user>hello<a>", 4, 3)


@on_a_loop
async def test_a_message_is_streamed():
    async with (
        openai_site(await FakeReplica.start()) as (place, _),
        claude(place) as client,
        client.messages.stream(model="fake", max_tokens=9, messages=HELLO, **SEED) as stream,
    ):
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == final.content[0].text == text_of(RENDERED, 4, 9)
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 9)


@on_a_loop
async def test_errors_are_in_the_words_of_the_client():
    async with openai_site(await FakeReplica.start()) as (place, _), claude(place) as client:
        with pytest.raises(anthropic.BadRequestError, match="temperature must be"):
            await client.messages.create(model="fake", max_tokens=6, messages=HELLO, extra_body={"temperature": -1})
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].name"):
            await client.messages.create(model="fake", max_tokens=6, messages=HELLO, tools=[{"name": "x y"}])
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="claude", max_tokens=6, messages=HELLO)


@on_a_loop
async def test_a_response_is_answered_whole_and_in_events():
    async with openai_site(await FakeReplica.start()) as (_, client):
        whole = await client.responses.create(
            model="fake", input="hello", max_output_tokens=6, instructions="be", **SEED
        )
        stream = await client.responses.create(model="fake", input=HELLO, max_output_tokens=7, stream=True, **SEED)
        events = [event async for event in stream]
    assert whole.output_text == text_of(b"<system>be<user>hello<a>", 4, 6)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 6
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == text_of(RENDERED, 4, 7)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == text_of(RENDERED, 4, 7)
    assert [event.sequence_number for event in events] == list(range(len(events)))


@on_a_loop
async def test_a_response_of_what_is_not_kept_is_refused():
    async with openai_site(await FakeReplica.start()) as (_, client):
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="fake", input="hello", previous_response_id="resp_1")


@pytest.mark.parametrize("api", ["messages", "responses"])
@on_a_loop
async def test_a_stream_goes_on_when_its_replica_dies(api):
    replicas = [await FakeReplica.start("one"), await FakeReplica.start("two")]
    async with openai_site(*replicas) as (place, client), claude(place) as other:
        await place.until_up(2)
        if api == "messages":
            stream = await other.messages.create(model="fake", max_tokens=60, messages=HELLO, stream=True, **SEED)
        else:
            stream = await client.responses.create(model="fake", input=HELLO, max_output_tokens=60, stream=True, **SEED)
        text = ""
        async for event in stream:
            if event.type == "content_block_delta":
                text += event.delta.text
            elif event.type == "response.output_text.delta":
                text += event.delta
            else:
                continue
            if len(text) == 7:
                busy = next(replica for replica in replicas if not replica.is_idle)
                await busy.kill()
                place.replicas.remove(busy)
    assert text == text_of(RENDERED, 4, 60)
