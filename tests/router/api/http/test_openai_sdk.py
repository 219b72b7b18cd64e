"""OpenAI's own client against a router: whole answers, streams, choices, errors, and streams whose replica dies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import openai
import pytest

from holdfast.router.config import LimitsConfig
from tests.fakes import FakeReplica, byte_tokenizer, fake_tokens
from tests.loops import on_a_loop
from tests.router.site import Site, site

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]
RENDERED = list(b"<user>hello<a>")


def with_template(path: str = ""):
    return byte_tokenizer(path, TEMPLATE)


def text_of(prompt: list[int] | bytes, seed: int, num_tokens: int) -> str:
    return bytes(fake_tokens(list(prompt), seed, num_tokens)).decode()


@asynccontextmanager
async def openai_site(
    *replicas: FakeReplica, limits: LimitsConfig | None = None, max_retries: int = 0
) -> AsyncIterator[tuple[Site, openai.AsyncOpenAI]]:
    async with site(*replicas, limits=limits, load_tokenizer=with_template, http=True) as place:
        base_url = f"http://{place.router.http_address}/v1"
        plain = openai.DefaultAsyncHttpxClient(verify=False)  # to read certificates takes longer than most tests
        options = {"api_key": "none", "max_retries": max_retries, "http_client": plain}
        async with openai.AsyncOpenAI(base_url=base_url, **options) as client:
            yield place, client


@on_a_loop
async def test_a_chat_is_answered_whole():
    async with openai_site(await FakeReplica.start()) as (_, client):
        answer = await client.chat.completions.create(model="fake", messages=HELLO, seed=5, max_completion_tokens=6)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text_of(RENDERED, 5, 6))
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (14, 6, 20)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint


@on_a_loop
async def test_a_chat_is_streamed_with_one_role_one_finish_reason_and_a_usage_at_the_end():
    async with openai_site(await FakeReplica.start()) as (_, client):
        stream = await client.chat.completions.create(
            model="fake", messages=HELLO, seed=5, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    with_choice = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in with_choice) == text_of(RENDERED, 5, 6)
    assert [choice.delta.role for choice in with_choice if choice.delta.role] == ["assistant"]
    assert [choice.finish_reason for choice in with_choice if choice.finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("api", ["chat", "text"])
@on_a_loop
async def test_every_chunk_has_the_usage_so_far_where_that_is_asked_for(api):
    asked = {
        "model": "fake",
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with openai_site(await FakeReplica.start()) as (_, client):
        if api == "chat":
            stream = await client.chat.completions.create(messages=HELLO, **asked)
        else:
            stream = await client.completions.create(prompt="hello", **asked)
        counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 6


@on_a_loop
async def test_several_choices_are_told_apart():
    async with openai_site(await FakeReplica.start()) as (_, client):
        stream = await client.chat.completions.create(
            model="fake", messages=HELLO, seed=1, n=3, max_tokens=4, stream=True
        )
        texts = ["", "", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [text_of(RENDERED, 1 + number, 4) for number in range(3)]


@on_a_loop
async def test_content_may_be_a_list_of_texts():
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    async with openai_site(await FakeReplica.start()) as (_, client):
        answer = await client.chat.completions.create(model="fake", messages=parts, seed=5, max_tokens=6)
    assert answer.choices[0].message.content == text_of(RENDERED, 5, 6)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", [b"hello"]),
        ([104, 105], [b"hi"]),
        (["one", "two"], [b"one", b"two"]),
        ([[1, 2], [3], [4]], [b"\1\2", b"\3", b"\4"]),
    ],
)
@on_a_loop
async def test_completions_take_texts_and_token_ids_one_or_several(prompt, prompts, stream):
    async with openai_site(await FakeReplica.start()) as (_, client):
        answer = await client.completions.create(model="fake", prompt=prompt, seed=3, n=2, max_tokens=5, stream=stream)
        texts = dict.fromkeys(range(2 * len(prompts)), "")
        if stream:
            async for chunk in answer:
                texts[chunk.choices[0].index] += chunk.choices[0].text
        else:
            texts = {choice.index: choice.text for choice in answer.choices}
            assert answer.usage.completion_tokens == 10 * len(prompts)
    assert texts == {2 * i + j: text_of(one, 3 + j, 5) for i, one in enumerate(prompts) for j in range(2)}


@on_a_loop
async def test_echo_puts_the_prompt_before_the_output_and_zero_tokens_are_the_prompt_alone():
    async with openai_site(await FakeReplica.start()) as (_, client):
        answer = await client.completions.create(model="fake", prompt="hello", echo=True, seed=3, max_tokens=5)
        scored = await client.completions.create(model="fake", prompt="hello", echo=True, seed=3, max_tokens=0)
    assert answer.choices[0].text == "hello" + text_of(b"hello", 3, 5)
    assert scored.choices[0].text == "hello"


@on_a_loop
async def test_models_are_listed():
    async with openai_site(await FakeReplica.start()) as (_, client):
        assert [model.id async for model in client.models.list()] == ["fake"]
        found = (await client.models.retrieve("fake")).to_dict()
        assert (found["owned_by"], found["quantization"], found["weight_bytes"]) == ("holdfast", "GGUF Q4_1", 3 << 20)
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await client.models.retrieve("other/model")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temperature": -1}, "temperature", "must be"),
        ({"top_p": 1.5}, "top_p", "must be"),
        ({"temperature": "hot"}, "temperature", "must be"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "read text alone",
        ),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs = true"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"n": 1000}, "n", "at most"),
        ({"stop": ["x"] * 100}, "stop", "at most"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "JSON schema"),
        ({"extra_body": {"thinking_token_budget": 9}}, "thinking_token_budget", "not supported"),
        (
            {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
            "continue_final_message",
            "add_generation_prompt",
        ),
        ({"extra_body": {"chat_template": "{{ x }}"}}, "chat_template", "default"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"max_tokens": 0}, "max_tokens", "must be"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_bad_input_is_a_400_that_names_the_field(fields, param, said, stream):
    async with openai_site(await FakeReplica.start()) as (_, client):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**{"model": "fake", "messages": HELLO, "stream": stream, **fields})
    assert refused.value.param.startswith(param)
    assert said in refused.value.message
    assert refused.value.type == "invalid_request_error"
    assert refused.value.response.headers["x-should-retry"] == "false"


@on_a_loop
async def test_a_prompt_that_is_too_long_says_so_as_harnesses_expect():
    replica = await FakeReplica.start()
    replica.max_model_len = 10
    async with openai_site(replica) as (_, client):
        with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 10 tokens") as refused:
            await client.completions.create(model="fake", prompt="a longer text than that")
    assert refused.value.code == "context_length_exceeded"


@on_a_loop
async def test_an_unknown_model_is_a_404_and_no_replica_a_503_that_may_be_tried_again():
    replica = await FakeReplica.start()
    async with openai_site(replica) as (_, client):
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="gpt", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    async with openai_site() as (_, client):
        with pytest.raises(openai.InternalServerError) as down:
            await client.chat.completions.create(model="fake", messages=HELLO)
    assert down.value.response.status_code == 503
    assert down.value.response.headers["retry-after"] == "1"


@on_a_loop
async def test_a_client_that_leaves_ends_its_request():
    replica = await FakeReplica.start()
    async with openai_site(replica) as (place, client):
        stream = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=100_000, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await place.until_idle()
        waiting = asyncio.create_task(client.chat.completions.create(model="fake", messages=HELLO, max_tokens=100_000))
        await replica.until(lambda: not replica.is_idle)
        waiting.cancel()
        await place.until_idle()


@on_a_loop
async def test_a_stream_goes_on_when_its_replica_dies():
    replicas = [await FakeReplica.start("one"), await FakeReplica.start("two")]
    async with openai_site(*replicas) as (place, client):
        await place.until_up(2)
        stream = await client.chat.completions.create(model="fake", messages=HELLO, seed=9, max_tokens=60, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if len(text) == 7:
                busy = next(replica for replica in replicas if not replica.is_idle)
                await busy.kill()
                place.replicas.remove(busy)
    assert text == text_of(RENDERED, 9, 60)


@on_a_loop
async def test_unknown_fields_are_accepted_and_logged_once(caplog):
    async with openai_site(await FakeReplica.start()) as (_, client):
        for _ in range(2):
            await client.chat.completions.create(
                model="fake", messages=HELLO, max_tokens=1, user="me", extra_body={"field_of_tomorrow": 1}
            )
    said = [record.message for record in caplog.records if "field_of_tomorrow" in record.message]
    assert len(said) == 1


@on_a_loop
async def test_requests_that_are_no_requests():
    async with openai_site(await FakeReplica.start(), limits=LimitsConfig(max_message_bytes=2**20)) as (place, _):
        base_url = f"http://{place.router.http_address}"
        async with httpx2.AsyncClient(base_url=base_url) as client:
            chat = "/v1/chat/completions"
            for content in (b"", b"{", b"[]", b'{"messages": 5}', b'\xff{"messages": []}', b'{"a":' * 2000):
                answer = await client.post(chat, content=content, headers=JSON)
                assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            assert (await client.post(chat, content=b"x" * (2**20 + 1), headers=JSON)).status_code == 400
            assert (await client.put(chat)).status_code == 405
            missing = await client.get("/v2/models")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
            echoed = await client.get("/v1/models", headers={"x-request-id": "mine"})
            assert echoed.headers["x-request-id"] == "mine"


@on_a_loop
async def test_tokens_and_state():
    replica = await FakeReplica.start()
    async with openai_site(replica) as (place, _):
        base_url = f"http://{place.router.http_address}"
        async with httpx2.AsyncClient(base_url=base_url) as client:
            message = (await client.post("/tokenize", json={"prompt": "hi"})).json()
            assert (message["tokens"], message["count"]) == ([104, 105], 2)
            assert (await client.post("/tokenize", json={"messages": HELLO})).json()["tokens"] == RENDERED
            assert (await client.post("/detokenize", json={"tokens": [104, 105]})).json() == {"prompt": "hi"}
            assert (await client.post("/tokenize", json={})).status_code == 400
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/version")).json()["version"]
            (load,) = (await client.get("/load")).json()["replicas"]
            assert load["model"] == "fake"
    async with openai_site() as (place, _):
        base_url = f"http://{place.router.http_address}"
        async with httpx2.AsyncClient(base_url=base_url) as client:
            assert (await client.get("/health")).status_code == 503


@on_a_loop
async def test_health_says_that_nothing_is_replaced_while_disks_are_full():
    replica = await FakeReplica.start()
    async with openai_site(replica) as (place, _):
        url = f"http://{place.router.http_address}/health"
        endpoints = place.directory._view.endpoints
        async with httpx2.AsyncClient() as client:
            assert (await client.get(url)).content == b""
            place.directory.set(endpoints, num_on_full_disks=2)
            while not (answer := await client.get(url)).content:
                pass
            (warning,) = answer.json()["warnings"]
            assert (answer.status_code, "nodes of 2 routers and replicas" in warning) == (200, True)
            place.directory.set(endpoints)
            while (answer := await client.get(url)).content:
                pass
            assert answer.status_code == 200
