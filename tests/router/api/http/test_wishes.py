"""Fields that clients of vLLM, OpenAI and Anthropic send beside a prompt: each works, or is refused by its name."""

import json
from contextlib import asynccontextmanager
from typing import Any

import pytest

from holdfast.router.config import LimitsConfig
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.api.http.test_admin import client_of
from tests.router.site import site

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"prompt": "hello", "max_tokens": 4}
MESSAGE = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
RESPONSE = {"input": "hi", "max_output_tokens": 4}
BY_PATH = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/messages": MESSAGE,
    "/v1/responses": RESPONSE,
}


@asynccontextmanager
async def api(limits: LimitsConfig | None = None, template: str = TEMPLATE):
    replica = await FakeReplica.start(step_s=0.0)
    load = lambda path: byte_tokenizer(path, template)  # noqa: E731
    options = {"load_tokenizer": load, "http": True, "limits": limits}
    async with site(replica, **options) as place, client_of(place) as client:
        yield client, replica


async def posted(client: Any, path: str, **fields: Any) -> Any:
    answer = await client.post(path, json={"model": "fake", **BY_PATH.get(path, {}), **fields})
    assert answer.status_code == 200, answer.text
    return answer


def events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


JSON = {"type": "json_object"}
TOOL = {"name": "f", "parameters": {"type": "object"}}
CALLED = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
TOOLS_OF_RESPONSES = {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"}
WRONG_SHAPE = {"type": "json_schema", "schema": {"type": "x"}}

REFUSED = [
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "[0, 20]"),
    ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ("/v1/chat/completions", {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "1"),
    ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens", "1"),
    *((path, {"top_k": -2}, "top_k", "at least 1, or 0") for path in BY_PATH),
    ("/v1/chat/completions", {"logit_bias": {"3": 1, "7": "x"}}, "logit_bias", "token 7"),
    ("/v1/completions", {"logit_bias": {"3": None}}, "logit_bias", "token 3"),
    *(
        ("/v1/chat/completions", {**shape, **CALLED}, next(iter(shape)), "must not be set with tools")
        for shape in ({"structured_outputs": {"regex": "a"}}, {"guided_regex": "a"}, {"response_format": JSON})
    ),
    ("/v1/responses", {"structured_outputs": {"regex": "a"}, **TOOLS_OF_RESPONSES}, "structured_outputs", "with tools"),
    (
        "/v1/completions",
        {"structured_outputs": {"regex": "a"}, "guided_json": {}},
        "structured_outputs",
        "conflicts with guided_json",
    ),
    ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ("/v1/chat/completions", {"logit_bias": {"two": 1}}, "logit_bias", "two"),
    ("/v1/chat/completions", {"logit_bias": {"one": 1, "2": 1, "two": 1}}, "logit_bias", "'one', 'two'"),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "20 (limits.max_logprobs)"),
    ("/v1/completions", {"logprobs": -1}, "logprobs", "all 256 tokens"),
    ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs", "all 256 tokens"),
    ("/v1/completions", {"prompt_logprobs": -2}, "prompt_logprobs", "[-1, 1024]"),
    ("/v1/completions", {"seed": 2**63}, "seed", "9223372036854775807]"),
    ("/v1/completions", {"seed": -(2**63) - 1}, "seed", "9223372036854775807]"),
    ("/v1/chat/completions", {"timeout": -1}, "timeout", "above 0"),
    ("/v1/chat/completions", {"messages": []}, "messages", ""),
    ("/v1/completions", {"logprobs": 21}, "logprobs", "[0, 20]"),
    ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs", "[0, 20]"),
    (
        "/v1/messages",
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
        "output_config",
        "",
    ),
    ("/v1/completions", {"logprob_token_ids": [5]}, "logprob_token_ids", "must come with logprobs"),
    ("/v1/completions", {"logprobs": 1, "logprob_token_ids": [5] * 129}, "logprob_token_ids", "at most 128"),
    ("/v1/completions", {"logprobs": 1, "logprob_token_ids": [5, 999999]}, "logprob_token_ids", "999999"),
    ("/v1/chat/completions", {"logprob_token_ids": [5]}, "logprob_token_ids", "must come with logprobs"),
    ("/v1/messages", {"logprob_token_ids": [5]}, "logprob_token_ids", "is not supported"),
    ("/v1/responses", {"logprob_token_ids": [5]}, "logprob_token_ids", "is not supported"),
    ("/v1/chat/completions", {"reasoning_effort": "banana"}, "reasoning_effort", "'none', 'minimal', 'low'"),
    ("/v1/responses", {"reasoning": {"effort": "banana"}}, "reasoning.effort", "'xhigh' or 'max'"),
    ("/v1/messages", {"output_config": {"effort": "banana"}}, "output_config.effort", "'xhigh' or 'max'"),
    ("/tokenize", {**CHAT, "reasoning_effort": "banana"}, "reasoning_effort", "'xhigh' or 'max'"),
    *((path, {"request_id": "x" * 200}, "request_id", "at most 128") for path in BY_PATH),
    ("/v1/completions", {"request_id": "a\nb"}, "request_id", "printable ASCII"),
    ("/v1/completions", {"request_id": 7}, "request_id", "string"),
    *((path, {"flat_logprobs": True}, "flat_logprobs", "must be False") for path in BY_PATH),
    *((path, {"stream_interval": 5}, "stream_interval", "is not supported") for path in BY_PATH),
    ("/v1/completions", {"logit_bias": {"999999": 1}}, "logit_bias", "unlike 999999"),
    ("/v1/completions", {"logit_bias": {"3": 1, "7": 101}}, "logit_bias", "token 7"),
    ("/v1/completions", {"truncation_side": "middle"}, "truncation_side", ""),
    ("/v1/completions", {"use_beam_search": True, "n": 11}, "n", "10"),
    ("/v1/completions", {"prompt": [999999]}, "prompt", ""),
    ("/v1/completions", {"prompt": None}, "prompt", "prompt: is not valid: Input should be a valid string"),
    ("/v1/completions", {"prompt": [1, 2, "x"]}, "prompt[2]", "valid integer"),
    ("/v1/completions", {"priority": "urgent"}, "priority", "priority: is"),
    ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens", "1"),
    ("/v1/responses", {"top_logprobs": 2}, "top_logprobs", "include"),
    ("/v1/responses", {"include": ["file_search_call.results"]}, "include", "message.output_text.logprobs"),
    ("/v1/responses", {"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs", "[0, 20]"),
    ("/v1/messages", {"max_tokens": 0}, "max_tokens", "1"),
    ("/v1/messages", {"stop_sequences": ["x" * 2000]}, "stop_sequences", "characters"),
    ("/tokenize", {"prompt": 7}, "prompt", ""),
    ("/detokenize", {"tokens": [-1]}, "tokens", ""),
]


@on_a_loop
async def test_a_refusal_names_what_was_written():
    async with api() as (client, _):
        for path, fields, named, limit in REFUSED:
            answer = await client.post(path, json={"model": "fake", **BY_PATH.get(path, {}), **fields})
            error = answer.json()["error"]
            assert answer.status_code == 400, (path, fields, error)
            assert error["message"].startswith(named), (path, fields, error)
            assert limit in error["message"], (path, fields)
            assert error.get("param", named).startswith(named), (path, fields)


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, "//"),
        ({"reasoning_effort": "low"}, "low/True/True"),
        ({"reasoning_effort": "none"}, "none/False/False"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none/True/False"),
        ({"chat_template_kwargs": {"reasoning_effort": "banana"}}, "banana//"),
    ],
)
@on_a_loop
async def test_an_effort_says_whether_the_model_thinks_unless_the_request_does(fields: dict[str, Any], seen: str):
    async with api(template="{{ reasoning_effort }}/{{ enable_thinking }}/{{ thinking }}") as (client, _):
        answer = await posted(client, "/v1/chat/completions", **fields, return_prompt_text=True)
        assert answer.json()["prompt_text"] == seen


IDS = {
    "/v1/chat/completions": ("chatcmpl-mine 1", lambda event: event["id"]),
    "/v1/completions": ("cmpl-mine 1", lambda event: event["id"]),
    "/v1/messages": ("msg_mine 1", lambda event: event["message"]["id"]),
    "/v1/responses": ("resp_mine 1", lambda event: event["response"]["id"]),
}


@pytest.mark.parametrize("path", BY_PATH)
@on_a_loop
async def test_a_request_has_the_id_that_its_body_says(path: str):
    """Whole, streamed, and streamed to a front, which comes back by the id if the router is lost."""
    own, of_stream = IDS[path]
    async with api() as (client, replica):
        whole = (await posted(client, path, request_id="mine 1")).json()
        assert whole["id"] == own
        body = {"model": "fake", **BY_PATH[path], "request_id": "mine 1", "stream": True}
        for headers in ({}, {"x-holdfast-hold": "1"}):
            answer = await client.post(path, json=body, headers=headers)
            assert of_stream(events(answer.text)[0]) == own
            assert answer.headers.get("x-holdfast-hold", "mine 1 0").rpartition(" ")[0] == "mine 1"
        assert {submit.request_id for submit in replica.submits} == {"mine 1"}
        answer = await client.post(path, json=body, headers={"x-holdfast-event-ids": "1"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("request_id")


@on_a_loop
async def test_prompts_under_one_id_are_its_parts():
    async with api() as (client, replica):
        answer = (await posted(client, "/v1/completions", prompt=["a", "b"], request_id="mine")).json()
        assert (answer["id"], len(answer["choices"])) == ("cmpl-mine", 2)
        first, second = replica.submits[-2:]
        assert first.request_id == second.request_id == "mine"
        assert first.sampling_params.seed != second.sampling_params.seed


@on_a_loop
async def test_a_prompt_is_cut_on_either_side():
    async with api() as (client, replica):
        for side, kept in (("left", "llo"), ("right", "hel"), (None, "llo")):
            fields = {} if side is None else {"truncation_side": side}
            await posted(client, "/v1/completions", truncate_prompt_tokens=3, **fields)
            assert bytes(replica.submits[-1].prompt_token_ids).decode() == kept


@pytest.mark.parametrize("num_top", [0, 2])
@on_a_loop
async def test_a_response_tells_log_probabilities_whole_and_streamed(num_top: int):
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": num_top}
    async with api() as (client, _):
        whole = (await posted(client, "/v1/responses", **asked)).json()
        (part,) = whole["output"][0]["content"]
        assert "".join(item["token"] for item in part["logprobs"]) == part["text"]
        assert {len(item["top_logprobs"]) for item in part["logprobs"]} == {num_top}
        message = events((await posted(client, "/v1/responses", stream=True, **asked)).text)
        deltas = [item for event in message if event["type"].endswith("text.delta") for item in event["logprobs"]]
        (done,) = [event for event in message if event["type"] == "response.output_text.done"]
        (last,) = message[-1]["response"]["output"][0]["content"]
        assert deltas == done["logprobs"] == last["logprobs"]
        assert "".join(item["token"] for item in deltas) == last["text"]
        plain = (await posted(client, "/v1/responses")).json()
        assert plain["output"][0]["content"][0]["logprobs"] == []


@on_a_loop
async def test_the_load_is_told_to_those_who_ask_for_it():
    async with api() as (client, _):
        for stream in (False, True):
            for asked, begin in (("TEXT", "TEXT "), ("json", "JSON {")):
                answer = await client.post(
                    "/v1/completions",
                    json={"model": "fake", **TEXT, "stream": stream},
                    headers={"endpoint-load-metrics-format": asked},
                )
                message = answer.headers["endpoint-load-metrics"]
                assert message.startswith(begin)
                assert "kv_cache_usage_perc" in message
        answer = await client.post(
            "/v1/completions", json={"model": "fake", **TEXT}, headers={"endpoint-load-metrics-format": "BINARY"}
        )
        assert "endpoint-load-metrics" not in answer.headers
        assert "endpoint-load-metrics" not in (await posted(client, "/v1/completions")).headers


@on_a_loop
async def test_what_there_is_nothing_of_is_null_and_usage_comes_when_asked_for():
    async with api() as (client, _):
        chat = (await posted(client, "/v1/chat/completions")).json()
        assert chat["prompt_logprobs"] is None
        assert chat["choices"][0]["message"]["reasoning"] is None
        assert chat["prompt_token_ids"] is chat["choices"][0]["token_ids"] is None
        text = (await posted(client, "/v1/completions")).json()
        for name in ("prompt_logprobs", "prompt_token_ids", "token_ids"):
            assert text["choices"][0][name] is None
        assert chat["usage"]["prompt_tokens_details"] is text["usage"]["prompt_tokens_details"] is None
        assert (await posted(client, "/tokenize", prompt="hi")).json()["token_strs"] is None
        for path in ("/v1/chat/completions", "/v1/completions"):
            plain = events((await posted(client, path, stream=True)).text)
            assert all("usage" not in chunk for chunk in plain)
            asked = events((await posted(client, path, stream=True, stream_options={"include_usage": True})).text)
            assert [chunk["usage"] is None for chunk in asked] == [True] * (len(asked) - 1) + [False]


@on_a_loop
async def test_a_streamed_message_has_the_usage_of_a_whole_one():
    async with api() as (client, _):
        whole = (await posted(client, "/v1/messages")).json()["usage"]
        message = events((await posted(client, "/v1/messages", stream=True)).text)
        (begun,) = [event for event in message if event["type"] == "message_start"]
        (ended,) = [event for event in message if event["type"] == "message_delta"]
        tokens = {name: value for name, value in whole.items() if "time" not in name}
        counts = {name: whole[name] for name in begun["message"]["usage"]}
        assert begun["message"]["usage"] == {**counts, "output_tokens": 0}
        assert {name: ended["usage"][name] for name in tokens} == tokens


@on_a_loop
async def test_tokens_are_written_as_their_ids_where_asked():
    async with api() as (client, _):
        fields = {"logprobs": 2, "return_tokens_as_token_ids": True}
        answer = (await posted(client, "/v1/completions", **fields)).json()
        assert all(token.startswith("token_id:") for token in answer["choices"][0]["logprobs"]["tokens"])
        tokens = (await posted(client, "/tokenize", prompt="hi", return_token_strs=True)).json()
        assert tokens["token_strs"] == ["h", "i"]


@on_a_loop
async def test_the_whole_vocabulary_may_be_asked_for_where_that_many_may():
    async with api(LimitsConfig(max_logprobs=256)) as (client, replica):
        await posted(client, "/v1/completions", logprobs=-1, prompt_logprobs=-1)
        asked = replica.submits[-1].sampling_params
        assert (asked.logprobs, asked.prompt_logprobs) == (256, 256)
        await posted(client, "/v1/chat/completions", logprobs=True, top_logprobs=-1)
        assert replica.submits[-1].sampling_params.logprobs == 256


@on_a_loop
async def test_every_64_bit_seed_is_taken():
    async with api() as (client, replica):
        for seed, taken in ((2**63 - 1, 2**63 - 1), (-5, 2**63 - 5), (-(2**63), 0)):
            await posted(client, "/v1/completions", seed=seed)
            assert replica.submits[-1].sampling_params.seed == taken
        for _ in range(2):
            await posted(client, "/v1/completions", seed=-1)
        assert len({submit.sampling_params.seed for submit in replica.submits[-2:]}) == 2, "-1 is no seed"


@on_a_loop
async def test_a_response_tells_its_prompt_and_output_as_the_model_has_them():
    async with api() as (client, replica):
        whole = (await posted(client, "/v1/responses", enable_response_messages=True, seed=1)).json()
        streamed = events(
            (await posted(client, "/v1/responses", enable_response_messages=True, seed=1, stream=True)).text
        )
        for response in (whole, streamed[-1]["response"]):
            (prompt,), (output,) = response["input_messages"], response["output_messages"]
            assert (prompt["type"], output["type"]) == ("raw_message_tokens", "raw_message_tokens")
            assert prompt["message"] == "user: hi\n"
            assert prompt["tokens"] == list(replica.submits[-1].prompt_token_ids)
            assert output["message"] == response["output"][0]["content"][0]["text"]
            assert output["tokens"] == list(output["message"].encode())
        assert "input_messages" not in (await posted(client, "/v1/responses")).json()
