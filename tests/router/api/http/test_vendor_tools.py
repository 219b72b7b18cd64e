"""Tools and thoughts in `/v1/messages` and `/v1/responses`, through the clients of Anthropic and OpenAI."""

import json
import sys

import anthropic
import httpx2
import openai
import pytest

from holdfast import HoldingTransport
from holdfast.router.tools.chat_style import ChatStyle
from holdfast.router.tools.reasoning import ThoughtCounter
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.api.http.test_tools import ASKED, CALL, TEMPLATE, script  # noqa: F401  # a fixture
from tests.router.site import site

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FOR_MESSAGES = [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}]
FOR_RESPONSES = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": None}]
CALL_ITEM = {"type": "function_call", "name": "weather", "arguments": "{}"}
RESULT_ITEM = {"type": "function_call_output", "call_id": 5, "output": "x"}
LISTS = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
UNIQUE = {"name": "unique", "strict": True}
"""Of a function whose lists cannot be enforced."""
SAID = "<think>hm, so</think>\n\nLet me see. " + CALL + CALL

CALLED = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}


def result(content: object, **fields: object) -> dict[str, object]:
    block = {"type": "tool_result", "tool_use_id": "1", "content": content, **fields}
    return {"role": "user", "content": [block]}


async def message(*, stream: bool = False, **fields):
    """The whole message, which of a stream the client puts together."""
    asked = {"model": "fake", "messages": ASKED, "max_tokens": 400, "stop_sequences": ["!"], **fields}
    replica = await FakeReplica.start(step_s=0.0)
    async with site(replica, load_tokenizer=lambda path: byte_tokenizer(path, TEMPLATE), http=True) as place:
        url = f"http://{place.router.http_address}"
        http = httpx2.AsyncClient(transport=HoldingTransport([place.router.http_address], verify=False))
        async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0, http_client=http) as client:
            if not stream:
                return await client.messages.create(**asked)
            async with client.messages.stream(**asked) as events:
                return await events.get_final_message()


async def response(*, stream: bool = False, **fields):
    asked = {"model": "fake", "input": "weather?", "max_output_tokens": 400, "extra_body": {"stop": ["!"]}, **fields}
    replica = await FakeReplica.start(step_s=0.0)
    async with site(replica, load_tokenizer=lambda path: byte_tokenizer(path, TEMPLATE), http=True) as place:
        url = f"http://{place.router.http_address}/v1"
        http = httpx2.AsyncClient(transport=HoldingTransport([place.router.http_address], verify=False))
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, http_client=http) as client:
            if not stream:
                return await client.responses.create(**asked)
            async with client.responses.stream(**asked) as events:
                kinds = [event.type async for event in events]
                assert kinds.count("response.function_call_arguments.done") == 2
                return await events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_a_message_has_blocks_of_thoughts_text_and_calls(stream, script):  # noqa: F811
    script(SAID)
    answer = await message(stream=stream, tools=FOR_MESSAGES)
    thoughts, text, *calls = answer.content
    assert (thoughts.type, thoughts.thinking.strip()) == ("thinking", "hm, so")
    assert (text.type, text.text.strip()) == ("text", "Let me see.")
    assert [(call.type, call.name, call.input) for call in calls] == [("tool_use", "weather", {"city": "Oslo"})] * 2
    assert len({call.id for call in calls}) == 2
    assert answer.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_a_response_has_items_of_thoughts_text_and_calls(stream, script):  # noqa: F811
    script(SAID)
    answer = await response(stream=stream, tools=FOR_RESPONSES)
    thoughts, text, *calls = answer.output
    assert (thoughts.type, thoughts.content[0].text.strip()) == ("reasoning", "hm, so")
    assert (text.type, text.content[0].text.strip()) == ("message", "Let me see.")
    assert [(call.type, call.name, json.loads(call.arguments)) for call in calls] == [
        ("function_call", "weather", {"city": "Oslo"})
    ] * 2
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
    assert answer.status == "completed"


@on_a_loop
async def test_an_answer_without_calls_is_text(script):  # noqa: F811
    script("It rains.")
    assert [block.text for block in (await message(tools=FOR_MESSAGES)).content] == ["It rains."]
    assert (await response(tools=FOR_RESPONSES)).output_text == "It rains."


@on_a_loop
async def test_earlier_calls_and_their_results_are_rendered(script):  # noqa: F811
    script("fine")
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}]}
    turns = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    answer = await message(messages=turns, tools=FOR_MESSAGES, thinking={"type": "enabled", "budget_tokens": 1024})
    rendered = "[weather]<user>weather?<assistant><tool_call>Rome</tool_call><tool>sun<user>and?<a>"
    assert answer.usage.input_tokens == len(rendered)
    assert answer.content[0].text == "fine"
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
        {"role": "user", "content": "and?"},
    ]
    reason = await response(input=items, tools=FOR_RESPONSES)
    assert (reason.usage.input_tokens, reason.output_text) == (len(rendered), "fine")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "always"}}, "tool_choice.type"),
        ({"tools": FOR_MESSAGES, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": [*FOR_MESSAGES, *FOR_MESSAGES]}, "tools[1].name must differ"),
        ({"tools": [{**UNIQUE, "input_schema": LISTS}]}, "tools[0].input_schema: properties.a.uniqueItems"),
        ({"messages": [{"role": "user", "content": None}], "system": "x"}, "messages[0].content must be text"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [*ASKED, {"role": "assistant", "content": [CALLED]}]}, "messages[1] must not be the last"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be json_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"messages": [result([{"type": "image"}])]}, "messages[0].content[0].content[0].type"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)
@on_a_loop
async def test_messages_that_are_wrong_are_refused_by_name(fields, said, script):  # noqa: F811
    script("no")
    with pytest.raises(anthropic.BadRequestError) as refused:
        await message(**fields)
    assert said in refused.value.body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": FOR_RESPONSES, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": FOR_RESPONSES, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tools": [{"type": "function", **UNIQUE, "parameters": LISTS}]}, "tools[0].parameters"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"input": [{"role": 5, "content": "x"}], "instructions": "x"}, "input[0].role"),
        ({"input": [*ASKED, {**CALL_ITEM, "call_id": 5}], "instructions": "x"}, "input[1].call_id"),
        ({"input": [*ASKED, RESULT_ITEM], "instructions": "x"}, "input[1].call_id"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)
@on_a_loop
async def test_responses_that_are_wrong_are_refused_by_name(fields, param, script):  # noqa: F811
    script("no")
    with pytest.raises(openai.BadRequestError) as refused:
        await response(**fields)
    assert refused.value.param == param


async def chat(*, stream: bool):
    replica = await FakeReplica.start(step_s=0.0)
    asked = {"model": "fake", "messages": ASKED, "max_tokens": 60, "stop": ["!"], "n": 2}
    async with site(replica, load_tokenizer=lambda path: byte_tokenizer(path, TEMPLATE), http=True) as place:
        base_url = f"http://{place.router.http_address}/v1"
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=plain) as client:
            if not stream:
                return await client.chat.completions.create(**asked)
            chunks = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            return [chunk async for chunk in chunks][-1]


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_tokens_of_thoughts_are_told_in_the_usage(stream, script, monkeypatch):  # noqa: F811
    """Tokens of the fake are bytes: the tags end with one and begin with the other that stand for them here."""

    def counter(self: ChatStyle, begins_inside: bool, call: str = "") -> ThoughtCounter:
        return ThoughtCounter(ord(">"), ord("/"), starts_inside=begins_inside)

    monkeypatch.setattr(ChatStyle, "thought_counter", counter)
    script(SAID)
    answer = await response(stream=stream, tools=FOR_RESPONSES)
    assert answer.usage.output_tokens_details.reasoning_tokens == len("hm, so<")
    script("<think>hm, so</think>\n\nIt rains. > ( / )")
    assert (await chat(stream=stream)).usage.completion_tokens_details.reasoning_tokens == 2 * len("hm, so<")


DEEP = f'{{"n": {"[" * 1100}{"]" * 1100}}}'


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
        ('{"n": 1e999, "m": -1e999, "k": 0.5}', {"n": "1e999", "m": "-1e999", "k": 0.5}),
        (DEEP, {} if sys.version_info < (3, 12) else json.loads(DEEP)),  # 3.12 has another limit for C
    ],
    ids=["a large integer", "beyond a float", "nested deeply"],
)
@on_a_loop
async def test_a_message_is_json_whatever_arguments_the_model_writes(arguments, read, script):  # noqa: F811
    script(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')
    answer = await message(tools=FOR_MESSAGES, max_tokens=5000)
    (call,) = answer.content
    assert (call.type, call.input) == ("tool_use", read)
