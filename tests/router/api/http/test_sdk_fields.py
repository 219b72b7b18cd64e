"""Each field of the request types of OpenAI's and Anthropic's clients, as they are installed: what it asks for is done,
or it is refused by name, and a value of a wrong type is refused by name.

Fields that vLLM's models have too are shown to work, or to be refused, in `test_vllm_fields.py`.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from tests.loops import on_a_loop
from tests.router.api.http.test_vllm_fields import BESIDE, FUNCTION, MODELS, api, named, of, seen

TYPES: Final[Mapping[str, tuple[str, type]]] = {
    "chat": ("ChatCompletionRequest", chat_params.CompletionCreateParamsNonStreaming),
    "text": ("CompletionRequest", text_params.CompletionCreateParamsNonStreaming),
    "responses": ("ResponsesRequest", response_create_params.ResponseCreateParamsNonStreaming),
    "messages": ("AnthropicMessagesRequest", message_create_params.MessageCreateParamsNonStreaming),
    "count": ("AnthropicCountTokensRequest", message_count_tokens_params.MessageCountTokensParams),
}
"""The type of each API's requests, and the model of `test_vllm_fields.py` for the same endpoint."""

WORKS: Final[Mapping[str, Any]] = {
    "verbosity": "low",
    "best_of": 2,
    "text.verbosity": "low",
    "reasoning.effort": "none",
    "output_config.effort": "low",
    "thinking.type": "disabled",
    "chat.stream_options": {"include_usage": True},
    "text.stream_options": {"include_usage": True},
}
"""Values that change something, of fields and of fields in objects."""

REFUSED: Final[Mapping[str, Any]] = {
    "audio": {"voice": "x", "format": "wav"},
    "function_call": {"name": "f"},
    "functions": [FUNCTION],
    "modalities": ["audio"],
    "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "stream_options.include_obfuscation": True,
    "access_programs": {"cyber": "daybreak_red"},
    "background_options": {"completion_window": "8h"},
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "reasoning.summary": "detailed",
    "reasoning.generate_summary": "concise",
    "reasoning.context": "all_turns",
    "reasoning.mode": "pro",
    "container": "c",
    "diagnostics": {"previous_message_id": "msg_1"},
    "inference_geo": "us",
    "speed": "fast",
    "thinking.display": "omitted",
    "tools[0].defer_loading": True,
    "tools[0].allowed_callers": ["code_execution_20250825"],
    "tools[0].input_examples": [{}],
}
"""Values that ask for what is not here."""

NO_EFFECT: Final[Mapping[str, Any]] = {
    "user": "me",
    "safety_identifier": "me",
    "service_tier": "auto",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "prompt_cache_key": "k",
    "metadata": {"a": "b"},
    "metadata.user_id": "me",
    "store": False,
    "image": {"context_compression": "auto"},
    "cache_control": {"type": "ephemeral"},
    "user_profile_id": "me",
    "workspace_id": "w",
    "reasoning.summary": "auto",
    "thinking.budget_tokens": 1024,
    "thinking.display": "summarized",
    "speed": "standard",
    "inference_geo": "global",
    "stream_options.include_obfuscation": False,
}
"""Values that no answer depends on."""

NO_TEXT: Final = (5, True, {"a": 1}, ["a"])
NO_OBJECT: Final = (5, "a", True, ["a"])
NO_LIST: Final = (5, True, {"a": 1})
NO_NUMBER: Final = ("a", True, {"a": 1}, [1])
NO_WHOLE: Final = (*NO_NUMBER, 1.5)
NO_FLAG: Final = (5, "a", {"a": 1}, [True])
WRONG_ABOUT_SCHEMA: Final = ({"name": 5}, {"description": ["a"]}, {"strict": "yes"}, {"strict": 1})

WRONG: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("model", "user", "safety_identifier", "prompt_cache_key", "suffix", "instructions"), NO_TEXT),
    **dict.fromkeys(("previous_response_id", "user_profile_id", "workspace_id", "inference_geo"), NO_TEXT),
    **dict.fromkeys(("service_tier", "prompt_cache_retention", "reasoning_effort", "verbosity"), (*NO_TEXT, "banana")),
    **dict.fromkeys(("truncation", "speed"), (*NO_TEXT, "banana")),
    **dict.fromkeys(("metadata", "prompt_cache_options", "response_format", "stream_options", "text"), NO_OBJECT),
    **dict.fromkeys(("reasoning", "output_config", "thinking", "logit_bias", "cache_control", "image"), NO_OBJECT),
    **dict.fromkeys(("audio", "prediction", "moderation", "diagnostics", "web_search_options"), NO_OBJECT),
    **dict.fromkeys(("access_programs", "background_options"), NO_OBJECT),
    **dict.fromkeys(("tools", "functions", "modalities", "context_management", "include"), (*NO_LIST, "a")),
    **dict.fromkeys(("stop", "stop_sequences", "messages", "input", "prompt", "system"), NO_LIST),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), NO_NUMBER),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "max_tool_calls"), NO_WHOLE),
    **dict.fromkeys(("n", "best_of", "seed", "top_logprobs", "top_k"), NO_WHOLE),
    **dict.fromkeys(("stream", "store", "background", "parallel_tool_calls", "echo", "chat.logprobs"), NO_FLAG),
    **dict.fromkeys(("tool_choice", "function_call", "conversation", "responses.prompt", "container"), (5, True, [1])),
    "text.logprobs": NO_WHOLE,
    "metadata.user_id": NO_TEXT,
    "reasoning.effort": (*NO_TEXT, "banana"),
    "reasoning.summary": (*NO_TEXT, "banana"),
    "text.verbosity": (*NO_TEXT, "banana"),
    "text.format": (*NO_OBJECT, *({"type": "json_schema", "schema": {}, **about} for about in WRONG_ABOUT_SCHEMA)),
    "chat.response_format": [
        {"type": "json_schema", "json_schema": {"schema": {}, **about}} for about in WRONG_ABOUT_SCHEMA
    ],
    "output_config.effort": (*NO_TEXT, "banana"),
    "thinking.type": (*NO_TEXT, "banana"),
    "thinking.budget_tokens": (*NO_WHOLE, 0, -5),
    "thinking.display": (*NO_TEXT, "banana"),
    "messages.tool_choice.disable_parallel_tool_use": NO_FLAG,
    "stream_options.include_usage": NO_FLAG,
    "stream_options.include_obfuscation": NO_FLAG,
}
"""Values of a wrong type, and values outside a set, by field: none of them may be accepted."""

OUTSIDE: Final[Mapping[str, tuple[Any, ...]]] = {
    "max_tokens": (0, -1),
    "max_completion_tokens": (0, -1),
    "max_output_tokens": (0, -1),
    "n": (0, 65, 2**31),
    "best_of": (0, 65),
    "seed": (2**63, -(2**63) - 1),
    "temperature": (-0.1, 100.1, 1e300),
    "top_p": (0, 1.1),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
    "top_logprobs": (-1, 21),
    "text.logprobs": (-1, 21),
    "logit_bias": ({"5": 101}, {"5": -101}, {"-1": 1}),
    "stop": ([""], ["a"] * 65),
    "stop_sequences": ([""], ["a"] * 65),
    "messages": ([],),
    **dict.fromkeys(
        ("chat.metadata", "responses.metadata"),
        ({"k" * 65: "v"}, {"k": "v" * 513}, {str(index): "v" for index in range(17)}, {"k": 5}),
    ),
}
"""Values just outside a bound."""


@cache
def fields(api_name: str) -> list[str]:
    return list(get_type_hints(TYPES[api_name][1]))


def request_of(api_name: str, name: str, value: Any) -> tuple[str, dict[str, Any]]:
    """Path and body of a request that sets a field, or a field in an object, with what it needs beside it."""
    model, _ = TYPES[api_name]
    path, base = MODELS[model]
    own, _, inner = name.partition(".")
    body = {"model": "fake", **base, **(of(BESIDE, model, own) or {})}
    if own == "tools[0]":
        kind = {"type": "function", **FUNCTION}
        tool = kind if api_name == "responses" else {"type": "custom", "name": "look", "input_schema": {}}
        return path, {**body, "tools": [{**tool, inner: value}]}
    if own == "thinking" and inner:
        return path, {**body, own: {"type": "enabled", inner: value}}
    return path, {**body, own: {inner: value} if inner else value}


def cases(table: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Of each API that has the field: its name, the field and its value. A name may begin with an API's."""
    for key, value in table.items():
        first, _, rest = key.partition(".")
        is_of_one = first in TYPES and rest.partition(".")[0] in fields(first)
        for api_name in [first] if is_of_one else TYPES:
            name = rest if is_of_one else key
            has_it = name.partition(".")[0].removesuffix("[0]") in fields(api_name)
            if has_it and (api_name, name[:9]) != ("chat", "tools[0]."):
                yield api_name, name, value


def test_something_is_said_of_every_field():
    for api_name, (model, _) in TYPES.items():
        tables = (*cases(WORKS), *cases(REFUSED), *cases(NO_EFFECT))
        said = {name.partition(".")[0] for one, name, _ in tables if one == api_name}
        assert set(fields(api_name)) <= said | set(named()[model]), api_name
        wrong = {name for one, name, _ in cases(WRONG) if one == api_name}
        assert set(fields(api_name)) <= wrong, api_name


@on_a_loop
async def test_what_is_said_to_work_changes_something():
    async with api() as (client, replica):
        for api_name, name, value in cases(WORKS):
            path, body = request_of(api_name, name, value)
            own = name.partition(".")[0]
            without = {other: one for other, one in body.items() if other not in (own, "model")}
            plain = await seen(client, replica, path, without, own)
            assert await seen(client, replica, path, body, own) != plain, f"{api_name}: {name} changes nothing"


@on_a_loop
async def test_what_is_not_here_is_refused_by_name_and_null_asks_for_nothing():
    async with api() as (client, _):
        for api_name, name, value in cases(REFUSED):
            path, body = request_of(api_name, name, value)
            answer = await client.post(path, json=body)
            assert answer.status_code == 400, f"{api_name}: {name} = {value}: {answer.text}"
            assert answer.json()["error"]["message"].startswith(name), answer.text
            path, body = request_of(api_name, name, None)
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, f"{api_name}: {name} = null: {answer.text}"


@on_a_loop
async def test_what_no_answer_depends_on_is_accepted():
    async with api() as (client, _):
        for api_name, name, value in cases(NO_EFFECT):
            path, body = request_of(api_name, name, value)
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, f"{api_name}: {name} = {value}: {answer.text}"


@pytest.mark.parametrize("api_name", TYPES)
@on_a_loop
async def test_a_value_of_a_wrong_type_or_out_of_bounds_is_refused_by_name(api_name: str):
    async with api() as (client, _):
        for one, name, values in (*cases(WRONG), *cases(OUTSIDE)):
            for value in values if one == api_name else ():
                path, body = request_of(api_name, name, value)
                answer = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
                assert answer.status_code == 400, (
                    f"{name} = {str(value)[:60]}: {answer.status_code} {answer.text[:200]}"
                )
                assert name.partition(".")[0] in answer.json()["error"]["message"], (name, answer.text)
