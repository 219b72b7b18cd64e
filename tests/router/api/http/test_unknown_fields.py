"""Fields in objects of a body: those of the clients' types are known, and any other is refused by its path.

Each API's body here has every object that the API reads, and each object in turn gets a field that nothing reads.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_type_hints

import pytest
from anthropic import types as anthropic_types
from openai.types import chat as chat_types
from openai.types import responses as response_types
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from openai.types.shared_params import FunctionDefinition, Reasoning
from openai.types.shared_params.response_format_json_schema import JSONSchema, ResponseFormatJSONSchema

from tests.loops import on_a_loop
from tests.router.api.http.test_vllm_fields import FUNCTION, HI, INCLUDED, SCHEMA, api

MARK: Final = {"type": "ephemeral"}
CALL: Final = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHOICE: Final = {"type": "function", "function": {"name": "look"}}
FORMAT: Final = {"type": "json_schema", "schema": SCHEMA}

BODIES: Final[Mapping[str, tuple[str, list[dict[str, Any]]]]] = {
    "chat": (
        "/v1/chat/completions",
        [
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "so"}]},
                    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
                    {"role": "user", "content": "go on"},
                ],
                "tools": [{"type": "function", "function": {**FUNCTION, "strict": True, "return": {"type": "string"}}}],
                "tool_choice": CHOICE,
                "stream": True,
                "stream_options": {"include_usage": True},
                "prompt_cache_options": {"mode": "implicit"},
                "metadata": {"a": "b"},
                "logit_bias": {"97": 1},
                "chat_template_kwargs": {"shade": "blue"},
            },
            {
                "messages": HI,
                "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}},
                "documents": [{"title": "it", "text": "so"}],
            },
            {"messages": HI, "structured_outputs": {"regex": "a"}},
            {"messages": HI, "response_format": {"type": "text"}},
        ],
    ),
    "completions": (
        "/v1/completions",
        [{"prompt": "hi", "response_format": {"type": "json_object"}, "stream": True, "stream_options": {}}],
    ),
    "responses": (
        "/v1/responses",
        [
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ho"}]},
                    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "so"}]},
                ],
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": {"type": "function", "name": "look"},
                "reasoning": {"effort": "low"},
                "text": {"verbosity": "low", "format": {"type": "text"}},
                "image": {"context_compression": "auto"},
                "include": INCLUDED,
                "prompt_cache_options": {"mode": "implicit"},
            },
            {"input": "hi", "text": {"format": {**FORMAT, "name": "it"}}, "stream": True, "stream_options": {}},
        ],
    ),
    "messages": (
        "/v1/messages",
        [
            {
                "system": [{"type": "text", "text": "be kind", "cache_control": MARK}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": MARK}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm", "signature": ""},
                            {"type": "redacted_thinking", "data": ""},
                            {"type": "text", "text": "ho"},
                            {"type": "tool_use", "id": "t1", "name": "look", "input": {}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "so"}]}
                        ],
                    },
                ],
                "tools": [{"name": "look", "input_schema": FUNCTION["parameters"], "cache_control": MARK}],
                "tool_choice": {"type": "auto"},
                "thinking": {"type": "disabled"},
                "cache_control": {"type": "ephemeral", "ttl": "5m"},
            },
            {"messages": HI, "output_config": {"effort": "low", "format": FORMAT}},
            {"messages": HI, "output_format": FORMAT},
        ],
    ),
}
"""Path and bodies of each API."""

LENGTHS: Final = {"responses": "max_output_tokens"}

ANYTHING: Final = re.compile(
    r"metadata|logit_bias|chat_template_kwargs|documents\[0\]"  # maps
    r"|.*(schema|parameters|return|input)(\.(properties|type))*"  # schemas, and a call's arguments
    r"|messages\[\d\](\.tool_calls\[0\](\.function)?)?"  # chat templates read them whole
)
"""Objects whose fields are the caller's."""


def objects_in(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object in a body, and where it is."""
    if isinstance(value, dict):
        if path:
            yield path, value
        for name, inner in value.items():
            yield from objects_in(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from objects_in(inner, f"{path}[{index}]")


@pytest.mark.parametrize("name", BODIES)
@on_a_loop
async def test_a_field_that_an_object_does_not_know_is_refused_by_its_path(name: str):
    path, bodies = BODIES[name]
    anthropic = name == "messages"
    refused = 0
    async with api() as (client, _):
        for body in bodies:
            asked = {"model": "fake", LENGTHS.get(name, "max_tokens"): 1, **body}
            answer = await client.post(path, json=asked)
            assert answer.status_code == 200 or "complete" in answer.text, answer.text
            for place, _ in objects_in(body):
                if ANYTHING.fullmatch(place) and not (anthropic and re.fullmatch(r"messages\[\d\]", place)):
                    continue
                spoilt = json.loads(json.dumps(asked))
                dict(objects_in(spoilt))[place]["zork"] = 1
                answer = await client.post(path, json=spoilt)
                assert answer.status_code == 400, f"{place}: {answer.text[:200]}"
                assert answer.json()["error"]["message"].startswith(f"{place}.zork"), f"{place}: {answer.text}"
                dict(objects_in(spoilt))[place]["zork"] = None
                answer = await client.post(path, json=spoilt)
                assert "is not known" not in answer.text, f"{place}: null asks for nothing: {answer.text}"
                refused += 1
    assert refused >= 2


CLIENTS: Final[Mapping[str, tuple[tuple[str, type], ...]]] = {
    "chat": (
        ("messages[0].content[0]", chat_types.ChatCompletionContentPartTextParam),
        ("response_format", ResponseFormatJSONSchema),
        ("response_format.json_schema", JSONSchema),
        ("stream_options", chat_types.ChatCompletionStreamOptionsParam),
        ("prompt_cache_options", chat_params.PromptCacheOptions),
        ("tools[0].function", FunctionDefinition),
    ),
    "responses": (
        ("input[0]", response_types.EasyInputMessageParam),
        ("input[0].content[0]", response_types.ResponseInputTextParam),
        ("input[1]", response_types.ResponseReasoningItemParam),
        ("input[2]", response_types.ResponseOutputMessageParam),
        ("input[2].content[0]", response_types.ResponseOutputTextParam),
        ("input[3]", response_types.ResponseFunctionToolCallParam),
        ("input[4]", response_types.response_input_item_param.FunctionCallOutput),
        ("tools[0]", response_types.FunctionToolParam),
        ("tool_choice", response_types.ToolChoiceFunctionParam),
        ("reasoning", Reasoning),
        ("text", response_types.ResponseTextConfigParam),
        ("prompt_cache_options", response_create_params.PromptCacheOptions),
    ),
    "messages": (
        ("messages[0].content[0]", anthropic_types.TextBlockParam),
        ("messages[1].content[0]", anthropic_types.ThinkingBlockParam),
        ("messages[1].content[1]", anthropic_types.RedactedThinkingBlockParam),
        ("messages[1].content[3]", anthropic_types.ToolUseBlockParam),
        ("messages[2].content[0]", anthropic_types.ToolResultBlockParam),
        ("tools[0]", anthropic_types.ToolParam),
        ("tool_choice", anthropic_types.ToolChoiceAutoParam),
        ("thinking", anthropic_types.ThinkingConfigEnabledParam),
        ("output_config", anthropic_types.OutputConfigParam),
        ("cache_control", anthropic_types.CacheControlEphemeralParam),
        ("system[0]", anthropic_types.TextBlockParam),
    ),
}
"""Objects of the bodies above, and their types in clients."""


@pytest.mark.parametrize("name", CLIENTS)
@on_a_loop
async def test_each_field_of_the_clients_own_types_is_known(name: str):
    path, bodies = BODIES[name]
    async with api() as (client, _):
        for place, kind in CLIENTS[name]:
            body = next(one for one in bodies if place in dict(objects_in(one)))
            for field in get_type_hints(kind):
                asked = json.loads(json.dumps({"model": "fake", LENGTHS.get(name, "max_tokens"): 1, **body}))
                dict(objects_in(asked))[place].setdefault(field, "x")
                answer = await client.post(path, json=asked)
                assert "is not known" not in answer.text, f"{place}.{field}: {answer.text}"
