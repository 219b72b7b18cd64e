"""LangChain's client of OpenAI against a router: whole, streamed, and with tools."""

import importlib

from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.api.http.test_openai_sdk import RENDERED, openai_site, text_of
from tests.router.api.http.test_tools import CALL, TEMPLATE, TOOLS, script  # noqa: F401  # a fixture
from tests.router.site import site

langchain_openai = importlib.import_module("langchain_openai")


def model(place, **options):
    url = f"http://{place.router.http_address}/v1"
    return langchain_openai.ChatOpenAI(base_url=url, api_key="x", model="fake", max_retries=0, **options)


@on_a_loop
async def test_chats_whole_and_streamed():
    async with openai_site(await FakeReplica.start()) as (place, _):
        chat = model(place, seed=5, max_tokens=6)
        answer = await chat.ainvoke("hello")
        pieces = [piece.content async for piece in chat.astream("hello")]
    assert answer.content == "".join(pieces) == text_of(RENDERED, 5, 6)
    assert answer.usage_metadata["output_tokens"] == 6


@on_a_loop
async def test_tools(script):  # noqa: F811
    script(CALL)
    replica = await FakeReplica.start()
    async with site(replica, load_tokenizer=lambda path: byte_tokenizer(path, TEMPLATE), http=True) as place:
        chat = model(place, max_tokens=400, stop=["!"]).bind_tools([TOOLS[0]])
        answer = await chat.ainvoke("weather?")
        whole = None
        async for piece in chat.astream("weather?"):
            whole = piece if whole is None else whole + piece
    for message in (answer, whole):
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [("weather", {"city": "Oslo"})]
        assert all(call["id"] for call in message.tool_calls), "LangChain answers calls by their ids"


@on_a_loop
async def test_responses():
    async with openai_site(await FakeReplica.start()) as (place, _):
        chat = model(place, max_tokens=6, use_responses_api=True, extra_body={"seed": 5})
        answer = await chat.ainvoke("hello")
        pieces = [piece.text async for piece in chat.astream("hello")]
    assert answer.text == "".join(map(str, pieces)) == text_of(RENDERED, 5, 6)
