"""Figures of a router as Prometheus scrapes them: ends, tokens, times and replicas, of each router its own."""

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.http.test_openai_sdk import HELLO, openai_site
from tests.router.site import collected, request


async def scraped(place) -> dict[tuple, float]:
    async with httpx2.AsyncClient(verify=False) as client:
        answer = await client.get(f"http://{place.router.http_address}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name.removeprefix("holdfast_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@on_a_loop
async def test_requests_are_counted_by_their_ends_and_tokens_through_all_apis():
    replicas = [await FakeReplica.start("one"), await FakeReplica.start("two")]
    async with openai_site(*replicas) as (place, client):
        await place.until_up(2)
        assert ("requests_total", "fake", "length") not in await scraped(place)
        await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=6)
        stream = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=6, stream=True)
        assert [chunk async for chunk in stream]
        assert await collected(place.stub.GenerateStream(request(max_tokens=3)))
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
        leaving = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=10**4, stream=True)
        async for _ in leaving:
            break
        await leaving.close()
        await place.until_idle()
        message = await scraped(place)
        assert message["requests_total", "fake", "length"] == 3
        assert message["requests_total", "fake", "cancelled"] == 1
        assert message["prompt_tokens_total", "fake"] == 14 * 3 + len("hello")
        assert message["output_tokens_total", "fake"] >= 6 + 6 + 3 + 1
        assert message["request_duration_seconds_count", "fake"] == 3
        assert message["time_to_first_token_seconds_count", "fake"] == 4
        assert message["http_responses_total", "/v1/chat/completions", "200"] == 3
        assert message["http_responses_total", "/v1/chat/completions", "400"] == 1
        assert (message["requests_open",], message["requests_queued",], message["model_replicas", "fake"]) == (0, 0, 2)
        assert message["replica_kv_cache_usage_ratio", "fake", "one"] == 0
        assert message["model_weight_bytes", "fake", "GGUF Q4_1"] == 3 << 20
        assert message["queue_time_seconds_count", "normal", "fake", "router"] == 4
        assert message["requests_queued_by_class", "normal", "fake"] == 0
        assert message["vllm:num_requests_waiting", "fake"] == 0
        assert message["vllm:kv_cache_usage_perc", "fake"] == 0
        assert message["vllm:lora_requests_info", "0", "", ""] == 1


@on_a_loop
async def test_a_request_that_goes_on_elsewhere_is_counted():
    replicas = [await FakeReplica.start("one"), await FakeReplica.start("two")]
    async with openai_site(*replicas) as (place, client):
        await place.until_up(2)
        stream = await client.chat.completions.create(
            model="fake", messages=HELLO, seed=9, max_tokens=200, stream=True, extra_body={"priority": "high"}
        )
        while not (await anext(stream)).choices[0].delta.content:
            pass
        busy = next(replica for replica in replicas if replica.submits)
        await busy.kill()
        place.replicas.remove(busy)
        assert [chunk async for chunk in stream]
        message = await scraped(place)
    assert message["failovers_total", "lost", "fake"] == message["replicas_lost_total", "fake"] == 1
    assert message["pause_seconds_count", "fake"] == 1
    assert message["replayed_tokens_total", "fake"] >= 1
    assert message["queue_time_seconds_count", "high", "fake", "router"] == 1
    assert message["queue_time_seconds_count", "high", "fake", "replica"] == 2
    assert ("replica_requests_running", "fake", busy.replica_id) not in message
