"""Anthropic's client makes, reads, cancels and deletes batches of messages, over the jobs that other batches have."""

import asyncio

import anthropic
import openai
import pytest

from holdfast.router.api.http import batch_lines
from holdfast.router.config import RouterConfig
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.http.test_batches import line, submitted, text_of, until_over, uploaded
from tests.router.api.http.test_messages_and_responses import claude
from tests.router.api.http.test_stored_responses import storing
from tests.router.api.test_keys_by_api import locked
from tests.router.security.test_gate import key_of, secret_of
from tests.router.site import site


def asked(custom_id, **params):
    said = [{"role": "user", "content": f"Say {custom_id}."}]
    return {"custom_id": custom_id, "params": {"model": "fake", "max_tokens": 4, "messages": said, **params}}


async def until_ended(client, batch_id):
    async with asyncio.timeout(30):
        while (batch := await client.messages.batches.retrieve(batch_id)).processing_status != "ended":
            await asyncio.sleep(0.02)
    return batch


async def results_of(client, batch_id):
    return {one.custom_id: one.result async for one in await client.messages.batches.results(batch_id)}


@on_a_loop
async def test_each_request_is_answered_as_it_would_be_alone_and_those_that_fail_say_why(tmp_path):
    async with storing(tmp_path) as (place, openai_client), claude(place) as client:
        requests = [asked("a", extra="kept"), asked("b", max_tokens=0), asked("c", stop_sequences=["zz"])]
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
        requests.append(asked("d", messages=[{"role": "user", "content": [image]}]))
        made = await client.messages.batches.create(requests=requests)
        assert (made.type, made.id[:9], made.results_url) == ("message_batch", "msgbatch_", None)
        batch = await until_ended(client, made.id)
        counts = batch.request_counts
        assert (counts.succeeded, counts.errored, counts.processing, counts.canceled, counts.expired) == (2, 2, 0, 0, 0)
        assert batch.ended_at >= batch.created_at
        found = await results_of(client, made.id)
        assert sorted(found) == ["a", "b", "c", "d"]
        alone = await client.messages.create(**requests[2]["params"])
        message = found["c"].message
        assert (message.type, message.usage.input_tokens) == ("message", alone.usage.input_tokens)
        assert message.stop_reason == alone.stop_reason == "max_tokens"
        assert (found["b"].type, found["b"].error.error.type) == ("errored", "invalid_request_error")
        assert "max_tokens" in found["b"].error.error.message
        assert "messages[0].content[0].type must be text, not 'image'" in found["d"].error.error.message
        assert {submit.priority for submit in place.replicas[0].submits[:2]} == {3}
        ours = await submitted(openai_client, [line("x")])
        await until_over(openai_client, ours.id)
        assert [one.id async for one in client.messages.batches.list(limit=1)] == [made.id]
        assert [one.id async for one in openai_client.batches.list()] == [ours.id]
        for id_of, get in ((ours.id, client.messages.batches.retrieve), (made.id, openai_client.batches.retrieve)):
            with pytest.raises((anthropic.NotFoundError, openai.NotFoundError)):
                await get(id_of)
        assert (await client.messages.batches.delete(made.id)).id == made.id
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.results(made.id)
        assert {one.filename async for one in openai_client.files.list(purpose="batch_output")} == {
            f"{ours.id}_output.jsonl"
        }


@on_a_loop
async def test_a_cancelled_batch_tells_which_requests_were_not_computed(tmp_path):
    async with storing(tmp_path, batch_concurrency=1) as (place, _), claude(place) as client:
        replica = place.replicas[0]
        replica.pause()
        made = await client.messages.batches.create(requests=[asked("a"), asked("b"), asked("c")])
        await replica.until(lambda: len(replica.submits) == 1)
        with pytest.raises(anthropic.BadRequestError, match="must have ended"):
            await client.messages.batches.delete(made.id)
        batch = await client.messages.batches.cancel(made.id)
        assert (batch.processing_status, batch.request_counts.canceled) == ("ended", 3)
        assert batch.cancel_initiated_at is not None
        assert {name: one.type for name, one in (await results_of(client, made.id)).items()} == dict.fromkeys(
            "abc", "canceled"
        )
        replica.resume()


WRONG = {
    "no requests": ([], "requests"),
    "no id": ([{"params": {}}], r"requests\[0\].custom_id"),
    "one id twice": ([asked("a"), asked("a")], r"requests\[1\].custom_id"),
    "no params": ([{"custom_id": "a", "params": 3}], r"requests\[0\].params"),
    "a stream": ([asked("a", stream=True)], r"requests\[0\].params.stream"),
}


@on_a_loop
async def test_a_batch_that_is_wrong_is_refused_by_name_and_so_is_one_without_a_store(tmp_path):
    async with storing(tmp_path) as (place, _), claude(place) as client:
        for requests, message in WRONG.values():
            with pytest.raises(anthropic.BadRequestError, match=message):
                await client.messages.batches.create(requests=requests)
        with pytest.raises(anthropic.NotFoundError, match="another"):
            await client.messages.batches.create(requests=[asked("a", model="another")])
    async with storing(None) as (place, _), claude(place) as client:
        with pytest.raises(anthropic.BadRequestError, match="--store"):
            await client.messages.batches.create(requests=[asked("a")])
        assert [one async for one in client.messages.batches.list()] == []


@on_a_loop
async def test_lines_wait_for_the_rates_of_their_key_and_are_charged_to_them(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_lines, "AGAIN_AFTER_S", 0.01)
    keys = locked(key_of("a", max_priority="low", requests_per_minute=600))
    config = RouterConfig(max_reconnect_s=0.1, store=str(tmp_path))
    async with site(await FakeReplica.start(), config=config, http=True, **keys) as place:
        url = f"http://{place.router.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=secret_of("a"), max_retries=0) as client:
            taken, gate = [], place.router._http_api._gate
            rates = gate._rates_of(next(key for key in gate._known().keys if key.name == "a"))
            monkeypatch.setattr(rates, "take_tokens", lambda number, now: taken.append(number))
            waits = []
            monkeypatch.setattr(rates, "wait_s", lambda now: (waits.pop() if waits else 0.0, "rate of requests"))
            texts = [line(name, "/v1/completions", prompt="hello") for name in "xy"]
            file_id = await uploaded(client, text_of(texts))
            waits += [0.5, 0.5]
            made = await client.batches.create(
                input_file_id=file_id, completion_window="24h", endpoint="/v1/completions"
            )
            over = await until_over(client, made.id)
            assert over.request_counts.completed == 2
            assert (sum(taken), waits) == (2 * (len("hello") + 6), [])
