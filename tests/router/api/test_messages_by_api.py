"""Messages by API: one chat has one prompt, whichever API it comes by; and what an API has of its own."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.offline.calls import chat_prompt
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.api.http.test_admin import client_of
from tests.router.site import Site, site
from tests.router.text.sample_templates import CHATML, DROPPING, FIRST_SYSTEM, HERMES, NO_SYSTEM

JSON = {"content-type": "application/json"}
WEATHER = {
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CUT = '{"city": "Bo'
END = 256
"""The token `<end>` of `with_end`."""


@asynccontextmanager
async def asked(
    template: str | dict[str, str], load: Any = None
) -> AsyncIterator[tuple[Site, httpx.AsyncClient, FakeReplica]]:
    replica = await FakeReplica.start(step_s=0.0)
    replica.vocab_size = END + 1
    load = load or (lambda path: byte_tokenizer(path, template))  # type: ignore[arg-type]
    async with site(replica, load_tokenizer=load, http=True) as place, client_of(place) as client:
        yield place, client, replica


def last_prompt(replica: FakeReplica) -> str:
    return bytes(replica.submits[-1].prompt_token_ids).decode()


def say(role: str, content: Any = "", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(arguments: str, name: str = "weather") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def use(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": "call_1", "name": "weather", "input": arguments}


CHATS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], dict[str, Any] | None]] = {
    "a developer": (
        DROPPING,
        [say("developer", "Be brief."), say("user", "hi")],
        {"input": [say("developer", "Be brief."), say("user", [{"type": "input_text", "text": "hi"}])]},
        {"system": "Be brief.", "messages": [say("user", "hi")]},
    ),
    "two instructions": (
        FIRST_SYSTEM,
        [say("system", "You help."), say("developer", "Be brief."), say("user", "hi")],
        {"instructions": "You help.", "input": [say("developer", "Be brief."), say("user", "hi")]},
        {"system": "You help.", "messages": [say("system", "Be brief."), say("user", "hi")]},
    ),
    "a call and its result": (
        HERMES,
        [
            say("user", "hi"),
            say("assistant", None, tool_calls=[call('{"city": "Bonn"}')]),
            say("tool", "21", tool_call_id="call_1"),
        ],
        {
            "input": [
                say("user", "hi"),
                {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Bonn"}'},
                {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "21"}]},
            ]
        },
        {
            "messages": [
                say("user", [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]),
                say("assistant", [use({"city": "Bonn"})]),
                say(
                    "user",
                    [{"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "21"}]}],
                ),
            ]
        },
    ),
    "a call that was cut": (
        HERMES,
        [
            say("user", "hi"),
            say("assistant", None, tool_calls=[call(CUT)]),
            say("tool", "not JSON", tool_call_id="call_1"),
        ],
        {
            "input": [
                say("user", "hi"),
                {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": CUT},
                {"type": "function_call_output", "call_id": "call_1", "output": "not JSON"},
            ]
        },
        None,
    ),
    "calls where the template knows none": (
        NO_SYSTEM,
        [
            say("system", "Be brief."),
            say("user", "hi"),
            say("assistant", "Let me see.", tool_calls=[call("{}")]),
            say("tool", None, tool_call_id="call_1"),
        ],
        {
            "instructions": "Be brief.",
            "input": [
                say("user", "hi"),
                say("assistant", [{"type": "output_text", "text": "Let me see."}]),
                {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ""},
                {"type": "function_call_output", "call_id": "call_1", "output": ""},
            ],
        },
        {
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                say("user", "hi"),
                say("assistant", [{"type": "text", "text": "Let me see."}, use({})]),
                say("user", [{"type": "tool_result", "tool_use_id": "call_1"}]),
            ],
        },
    ),
    "a refusal": (
        HERMES,
        [say("user", "hi"), say("assistant", None, refusal="No."), say("user", "why?")],
        {"input": [say("user", "hi"), say("assistant", [{"type": "refusal", "refusal": "No."}]), say("user", "why?")]},
        {"messages": [say("user", "hi"), say("assistant", "No."), say("user", "why?")]},
    ),
}


@pytest.mark.parametrize("case", CHATS)
@on_a_loop
async def test_one_chat_has_one_prompt_by_every_api(case):
    template, messages, response, message = CHATS[case]
    tools = [{"type": "function", "function": WEATHER}]
    expected = chat_prompt(byte_tokenizer("", template), messages, tools=tools)
    async with asked(template) as (place, client, replica):
        bodies = {
            "/v1/chat/completions": {"messages": messages, "tools": tools, "max_tokens": 1},
            "/v1/responses": {**response, "tools": [{"type": "function", **WEATHER}], "max_output_tokens": 1},
        }
        if message is not None:
            described = {"name": "weather", "description": "of a city", "input_schema": WEATHER["parameters"]}
            bodies["/v1/messages"] = {**message, "tools": [described], "max_tokens": 1}
        for path, body in bodies.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert last_prompt(replica) == expected, path
        counted = await client.post("/tokenize", json={"messages": messages, "tools": tools})
        assert bytes(counted.json()["tokens"]).decode() == expected
        if message is not None:
            counted = await client.post("/v1/messages/count_tokens", json={**message, "tools": [described]})
            assert counted.json() == {"input_tokens": len(expected.encode())}
        async with AsyncClient(place.router.address) as ours:
            await ours.generate(messages=messages, tools=tools, params=SamplingParams(max_tokens=1))
        assert last_prompt(replica) == expected


ANSWER = say("assistant", "The end is")


@on_a_loop
async def test_a_last_message_is_continued_where_it_is_asked_for():
    begun = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe end is"
    messages = [say("user", "hi"), ANSWER]
    async with asked(CHATML) as (place, client, replica):
        for more in ({}, {"add_generation_prompt": False}):
            body = {"messages": messages, "max_tokens": 3, "seed": 1, "continue_final_message": True, **more}
            plain = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
            assert last_prompt(replica) == begun
            echoed = await client.post("/v1/chat/completions", json={**body, "echo": True})
            assert echoed.json()["choices"][0]["message"]["content"] == "The end is" + plain
            streamed = (await client.post("/v1/chat/completions", json={**body, "echo": True, "stream": True})).text
            events = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: {")]
            pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
            assert "".join(pieces) == "The end is" + plain
            counted = (
                await client.post("/tokenize", json={"messages": messages, "continue_final_message": True})
            ).json()
            assert bytes(counted["tokens"]).decode() == begun
        message = await client.post("/v1/messages", json={"messages": messages, "max_tokens": 3, "seed": 1})
        assert last_prompt(replica) == begun
        assert message.json()["content"] == [{"type": "text", "text": plain}]
        async with AsyncClient(place.router.address) as ours:
            params = SamplingParams(max_tokens=3, seed=1)
            message = await ours.generate(messages=messages, continue_final_message=True, params=params)
            assert (last_prompt(replica), message.completions[0].text) == (begun, plain)
        closed = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, "echo": True})
        assert last_prompt(replica) == begun + "<|im_end|>\n<|im_start|>assistant\n"
        assert closed.json()["choices"][0]["message"]["content"].startswith("The end is")
        alone = await client.post(
            "/v1/messages", json={"messages": [say("user", "hi"), say("assistant", "")], "max_tokens": 1}
        )
        assert alone.status_code == 200
        assert last_prompt(replica) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


NAMED = {
    "default": DROPPING,
    "tool_use": HERMES,
    "rag": "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}" + DROPPING,
}


@on_a_loop
async def test_named_templates_are_chosen_as_transformers_chooses_them():
    body = {"messages": [say("user", "hi")], "max_tokens": 1}
    tools = {"tools": [{"type": "function", "function": WEATHER}]}
    documents = {"documents": [{"text": "fact"}]}
    async with asked(NAMED) as (place, client, replica):
        for more, prompt in (
            ({}, "<user>hi<assistant>"),
            (documents, "<user>hi<assistant>"),
            (tools, "<tools>"),
            ({**documents, "chat_template": "rag"}, "[fact]<user>hi<assistant>"),
            ({**tools, "chat_template": "default"}, "<system># Tools"),
        ):
            answer = await client.post("/v1/chat/completions", json={**body, **more})
            assert answer.status_code == 200, answer.text
            assert last_prompt(replica).startswith(prompt)
            counted = (await client.post("/tokenize", json={**body, **more})).json()["tokens"]
            assert bytes(counted).decode() == last_prompt(replica)
        async with AsyncClient(place.router.address) as ours:
            params = SamplingParams(max_tokens=1)
            await ours.generate(
                messages=body["messages"], chat_template="rag", chat_template_kwargs=documents, params=params
            )
            assert last_prompt(replica) == "[fact]<user>hi<assistant>"
        refused = (await client.post("/v1/chat/completions", json={**body, "chat_template": "other"})).json()["error"]
        assert refused["param"] == "chat_template"
        assert "default, rag, tool_use" in refused["message"]


def with_end(folder: Path, template: str, **config: object) -> Tokenizer:
    """Bytes and `<end>`, which tokenizer.json does not call special; with a tokenizer.json grammars can be compiled."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.add_tokens([AddedToken("<end>", special=False, normalized=False)])
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    return Tokenizer.load(str(folder))


@pytest.mark.parametrize("template", [CHATML, FIRST_SYSTEM, NO_SYSTEM])
@on_a_loop
async def test_a_model_whose_template_knows_no_tools_is_called_by_every_api(template, tmp_path, monkeypatch):
    said = 'So.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    tokenizer = with_end(tmp_path / "model", template)
    ids = [*tokenizer.encode(said), *[33] * 300]
    monkeypatch.setattr("tests.fakes.fake_token", lambda prompt, seed, index: ids[index])
    tools = [{"type": "function", "function": WEATHER}]
    length = len(tokenizer.encode(said))
    async with asked(template, lambda path: tokenizer) as (place, client, replica):
        chat = {"messages": [say("user", "hi")], "tools": tools, "max_tokens": length}
        whole = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]
        assert (whole["content"].strip(), whole["tool_calls"][0]["function"]["name"]) == ("So.", "weather")
        streamed = (await client.post("/v1/chat/completions", json={**chat, "stream": True})).text
        assert '"name":"weather"' in streamed
        assert "tool_call>" not in streamed
        described = {"name": "weather", "input_schema": WEATHER["parameters"]}
        asks = {"messages": [say("user", "hi")], "tools": [described], "max_tokens": length}
        blocks = (await client.post("/v1/messages", json=asks)).json()["content"]
        assert blocks[-1]["input"] == {"city": "Oslo"}
        asks = {"input": "hi", "tools": [{"type": "function", **WEATHER}], "max_output_tokens": length}
        items = (await client.post("/v1/responses", json=asks)).json()["output"]
        assert json.loads(items[-1]["arguments"]) == {"city": "Oslo"}
        async with AsyncClient(place.router.address) as ours:
            params = SamplingParams(max_tokens=length)
            message = await ours.generate(messages=[say("user", "hi")], tools=tools, params=params)
        assert message.completions[0].chat.tool_calls[0].name == "weather"
        assert not replica.submits[-1].sampling_params.grammar
        await client.post("/v1/chat/completions", json={**chat, "tool_choice": "required"})
        assert "weather" in replica.submits[-1].sampling_params.grammar
        without = await client.post("/v1/chat/completions", json={**chat, "tool_choice": "none"})
        assert "tool_call>" in without.json()["choices"][0]["message"]["content"]
        assert "# Tools" not in tokenizer.decode(replica.submits[-1].prompt_token_ids)


class City(pydantic.BaseModel):
    name: str


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_anthropics_client_parses_answers_of_a_shape(stream, tmp_path, monkeypatch):
    said = '{"name": "Oslo"}'
    tokenizer = with_end(tmp_path / "model", CHATML)
    ids = tokenizer.encode(said)
    monkeypatch.setattr("tests.fakes.fake_token", lambda prompt, seed, index: ids[index])
    wish = {"model": "fake", "max_tokens": len(ids), "messages": [say("user", "hi")], "output_format": City}
    async with asked(CHATML, lambda path: tokenizer) as (place, _, replica):
        plain, url = anthropic.DefaultAsyncHttpxClient(verify=False), f"http://{place.router.http_address}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, http_client=plain) as claude:
            if stream:
                async with claude.messages.stream(**wish) as events:
                    parsed = await events.get_final_message()
            else:
                parsed = await claude.messages.parse(**wish)
        assert parsed.parsed_output == City(name="Oslo")
        assert "name" in replica.submits[-1].sampling_params.grammar


SHAPE = {"type": "json_schema", "schema": City.model_json_schema()}


@pytest.mark.parametrize("fields", [{"output_config": {"format": SHAPE, "effort": "low"}}, {"output_format": SHAPE}])
@on_a_loop
async def test_the_shape_of_a_message_is_enforced_or_refused_by_name(fields, tmp_path):
    place_of = "output_format" if "output_format" in fields else "output_config.format"
    async with asked(CHATML, lambda path: with_end(tmp_path / "model", CHATML)) as (_, client, replica):
        body = {"max_tokens": 2, "messages": [say("user", "hi")], **fields}
        assert (await client.post("/v1/messages", json=body)).status_code == 200
        assert "name" in replica.submits[-1].sampling_params.grammar
        prefilled = {**body, "messages": [say("user", "hi"), ANSWER]}
        refused = await client.post("/v1/messages", json=prefilled)
        assert refused.status_code == 400
        assert "messages[1]" in refused.json()["error"]["message"]
        forced = {"tools": [{"name": "weather", "input_schema": {}}], "tool_choice": {"type": "any"}}
        refused = await client.post("/v1/messages", json={**body, **forced})
        assert place_of in refused.json()["error"]["message"]


@on_a_loop
async def test_tokens_come_back_as_they_were_with_special_ones(tmp_path):
    tokenizer = with_end(tmp_path / "model", CHATML, eos_token="<end>")
    async with asked(CHATML, lambda path: tokenizer) as (place, client, _):
        tokens = (await client.post("/tokenize", json={"prompt": "a<end>ü"})).json()["tokens"]
        assert tokens[1] == END
        assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": "a<end>ü"}
        async with AsyncClient(place.router.address) as ours:
            assert await ours.detokenize(tokens) == "a<end>ü"


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("is_special", [False, True])
@on_a_loop
async def test_what_has_ended_an_output_is_no_text(is_special, is_kept, tmp_path, monkeypatch):
    named = {"eos_token": "<end>"} if is_special else {}
    tokenizer = with_end(tmp_path / "model", CHATML, **named)
    ids = [*tokenizer.encode("so"), END]
    monkeypatch.setattr("tests.fakes.fake_token", lambda prompt, seed, index: ids[index])
    body = {"messages": [say("user", "hi")], "max_tokens": 9, "include_stop_str_in_output": is_kept}
    async with asked(CHATML, lambda path: tokenizer) as (_, client, _):
        for stop in ({"stop_token_ids": [END]}, {"stop_token_ids": [END], "skip_special_tokens": False}):
            shows = is_kept and (not is_special or "skip_special_tokens" in stop)
            answer = await client.post("/v1/chat/completions", json={**body, **stop})
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("so<end>" if shows else "so", "stop")
            streamed = (await client.post("/v1/chat/completions", json={**body, **stop, "stream": True})).text
            assert ("<end>" in streamed) == shows
