"""Stock clients of OpenAI and Anthropic over `HoldingTransport`: streams that are cut at any frame; nobody can tell."""

import asyncio
import importlib

import anthropic
import httpx2
import openai
import pytest

from holdfast import HoldingTransport
from tests.cluster.client.two_routers import NUM_TOKENS, Two, openai_client, two_routers
from tests.loops import on_a_loop
from tests.router.api.http.test_openai_sdk import HELLO, RENDERED, text_of

STOP = text_of(b"you", 5, NUM_TOKENS)[4:6]
"""Ends the second prompt's completion."""


NEARLY_STOPS = [text_of(RENDERED, seed, NUM_TOKENS)[at : at + 2] for seed in (5, 6) for at in (1, 4)]


async def chat(place: Two, transport: HoldingTransport) -> tuple[str, dict]:
    async with openai_client(place, transport) as client:
        stream = await client.chat.completions.create(
            model="fake",
            messages=HELLO,
            seed=5,
            n=2,
            max_tokens=NUM_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "|".join("".join(one.delta.content or "" for one in choices if one.index == index) for index in (0, 1))
    assert (len({one.id for one in chunks}), len({one.created for one in chunks})) == (1, 1)
    usage = chunks[-1].usage
    return text, {
        "roles": [one.index for one in choices if one.delta.role],
        "ends": sorted((one.index, one.finish_reason) for one in choices if one.finish_reason),
        "usage": (usage.prompt_tokens, usage.completion_tokens),
    }


async def chat_with_logprobs(place: Two, transport: HoldingTransport) -> tuple[str, dict]:
    """Stop strings hold text back, and its tokens with it."""
    async with openai_client(place, transport) as client:
        stream = await client.chat.completions.create(
            model="fake",
            messages=HELLO,
            seed=5,
            n=2,
            max_tokens=NUM_TOKENS,
            stream=True,
            logprobs=True,
            stop=[start + "never" for start in NEARLY_STOPS],
        )
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks]
    text = "|".join("".join(one.delta.content or "" for one in choices if one.index == index) for index in (0, 1))
    heard = [(one.index, item.token) for one in choices if one.logprobs for item in one.logprobs.content or ()]
    tokens = "|".join("".join(token for index, token in heard if index == choice) for choice in (0, 1))
    assert tokens == text, "each token is told once"
    return text, {"roles": sorted(one.index for one in choices if one.delta.role)}


async def completion(place: Two, transport: HoldingTransport) -> tuple[str, dict]:
    async with openai_client(place, transport) as client:
        stream = await client.completions.create(
            model="fake",
            prompt=["hello", "you"],
            seed=5,
            max_tokens=NUM_TOKENS,
            echo=True,
            stream=True,
            stop=[STOP],
        )
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks]
    text = "|".join("".join(one.text for one in choices if one.index == index) for index in (0, 1))
    assert len({one.id for one in chunks}) == 1
    return text, {"ends": sorted((one.index, one.stop_reason) for one in choices if one.finish_reason)}


async def response(place: Two, transport: HoldingTransport) -> tuple[str, dict]:
    async with openai_client(place, transport) as client:
        stream = await client.responses.create(
            model="fake", input="hello", max_output_tokens=NUM_TOKENS, stream=True, extra_body={"seed": 5}
        )
        events = [event async for event in stream]
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert events[-1].response.output_text == text
    kinds = [one.type for one in events if one.type != "response.output_text.delta"]
    return text, {"kinds": kinds, "usage": events[-1].response.usage.output_tokens}


async def message(place: Two, transport: HoldingTransport) -> tuple[str, dict]:
    http = httpx2.AsyncClient(transport=transport)
    url = f"http://{place.addresses[0]}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0, http_client=http) as client:
        asked = {"model": "fake", "max_tokens": NUM_TOKENS, "messages": HELLO, "extra_body": {"seed": 5}}
        events = [event async for event in await client.messages.create(stream=True, **asked)]
    text = "".join(one.delta.text for one in events if one.type == "content_block_delta")
    kinds = [one.type for one in events if one.type != "content_block_delta"]
    return text, {"kinds": kinds, "usage": events[-2].usage.output_tokens}


APIS = {
    chat: "|".join(text_of(RENDERED, seed, NUM_TOKENS) for seed in (5, 6)),
    chat_with_logprobs: "|".join(text_of(RENDERED, seed, NUM_TOKENS) for seed in (5, 6)),
    completion: "|".join(
        prompt + text_of(prompt.encode(), 5, NUM_TOKENS).partition(STOP)[0] for prompt in ("hello", "you")
    ),
    response: text_of(RENDERED, 5, NUM_TOKENS),
    message: text_of(RENDERED, 5, NUM_TOKENS),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.__name__)
@on_a_loop
async def test_a_stream_that_is_cut_at_any_frame_goes_on(api, part):
    async with two_routers() as place:
        whole = await api(place, place.transport())
        assert whole[0] == APIS[api]
        frames = range(part, NUM_TOKENS, 3)
        cuts = [(num_marks, num_bytes) for num_marks in frames for num_bytes in (0, 1 + 37 * num_marks)]
        for cut in cuts:
            place.cut(cut)
            assert await api(place, place.transport()) == whole, cut
        assert place.num_cut >= len(cuts) // 2


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.__name__)
@on_a_loop
async def test_a_stream_that_is_cut_again_and_again_goes_on(api):
    async with two_routers() as place:
        whole = await api(place, place.transport())
        place.cut(*[(1, 3)] * 30)
        assert await api(place, place.transport()) == whole
        assert place.num_cut >= 3


@on_a_loop
async def test_a_blocking_client_goes_on_and_so_does_one_that_reads_in_thoughts():
    def ask(address: str, transport: HoldingTransport) -> str:
        with httpx2.Client(transport=transport) as http:
            client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=0, http_client=http)
            stream = client.chat.completions.create(
                model="fake", messages=HELLO, seed=5, max_tokens=NUM_TOKENS, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async with two_routers() as place:
        for num_marks in range(NUM_TOKENS):
            place.cut((num_marks, 5))
            assert await asyncio.to_thread(ask, place.addresses[0], place.transport()) == text_of(
                RENDERED, 5, NUM_TOKENS
            )
        assert place.num_cut


@on_a_loop
async def test_httpx_before_2_is_served_as_well():
    httpx = importlib.import_module("httpx")

    def ask(address: str, transport: HoldingTransport) -> str:
        with httpx.Client(transport=transport) as http:
            client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=0, http_client=http)
            stream = client.chat.completions.create(
                model="fake", messages=HELLO, seed=5, max_tokens=NUM_TOKENS, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async with two_routers() as place:
        place.cut((2, 5))
        assert await asyncio.to_thread(ask, place.addresses[0], place.transport()) == text_of(RENDERED, 5, NUM_TOKENS)
        assert place.num_cut == 1


@on_a_loop
async def test_a_stream_without_a_seed_goes_on_with_the_tokens_that_it_had():
    async with two_routers() as place:
        place.cut((3, 0))
        async with openai_client(place, place.transport()) as client:
            stream = await client.chat.completions.create(
                model="fake", messages=HELLO, max_tokens=NUM_TOKENS, stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    first, second = (replica.submits[0] for replica in place.replicas)
    assert first.sampling_params.seed == second.sampling_params.seed
    assert text == text_of(RENDERED, first.sampling_params.seed, NUM_TOKENS)
    assert place.num_cut == 1
