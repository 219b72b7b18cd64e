"""Each field of vLLM's request models: it changes what a replica gets or what is answered, or it is refused by name.

`vllm_fields.txt` has the names. A field that a fake replica shows nothing of has a test elsewhere, which is named here.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from holdfast.cluster.offline.engine_args import DEFAULTS
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.sampling_params import PARAMETERS
from holdfast.worker.structured_outputs import StructuredOutputs
from holdfast.worker.value_types import SAMPLING_FIELDS, STRUCTURE_FIELDS
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.http.test_admin import client_of
from tests.router.site import site

ROOT: Final = Path(__file__).resolve().parents[4]
DEMO: Final = ROOT / "cluster/bundled_model/model"
TEMPLATE: Final = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"
    "{{ documents }}{{ reasoning_effort }}{{ enable_thinking }}{{ shade }}{{ tools }}{{ verbosity }}"
    "{% if add_generation_prompt %}\nassistant: {% endif %}"
    '{# <tool_call>{"name": "", "arguments": {}}</tool_call> #}'
)
HI: Final = [{"role": "user", "content": "hi"}]
BEGUN: Final = [*HI, {"role": "assistant", "content": "ho"}]
SCHEMA: Final = {"type": "object", "properties": {}, "additionalProperties": False}
SHAPE: Final = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
FUNCTION: Final = {"name": "look", "parameters": {"type": "object", "properties": {}}}
TOOL: Final = [{"type": "function", "function": FUNCTION}]
INCLUDED: Final = ["message.output_text.logprobs"]
LETTERS: Final = list("abcdefghijklmnopqrstuvwxyz")

MODELS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "ChatCompletionRequest": ("/v1/chat/completions", {"messages": HI, "max_tokens": 4, "seed": 1}),
    "CompletionRequest": ("/v1/completions", {"prompt": "hello", "max_tokens": 4, "seed": 1}),
    "ResponsesRequest": ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "seed": 1}),
    "AnthropicMessagesRequest": ("/v1/messages", {"messages": HI, "max_tokens": 4, "seed": 1}),
    "AnthropicCountTokensRequest": ("/v1/messages/count_tokens", {"messages": HI}),
    "TokenizeCompletionRequest": ("/tokenize", {"prompt": "hello"}),
    "TokenizeChatRequest": ("/tokenize", {"messages": HI}),
    "DetokenizeRequest": ("/detokenize", {"tokens": [104, 105]}),
}
"""Where each is sent, and what a request says."""

WORKS: Final[Mapping[str, Any]] = {
    "messages": [{"role": "user", "content": "what is it?"}],
    "prompt": "what?",
    "input": "what?",
    "tokens": [104],
    "system": "be kind",
    "instructions": "be kind",
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "min_tokens": 1,
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "seed": 2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"97": 1},
    "allowed_token_ids": [97, 98],
    "bad_words": ["a"],
    "stop": LETTERS,
    "stop_sequences": LETTERS,
    "stop_token_ids": [97],
    "ignore_eos": True,
    "logprobs": True,
    "CompletionRequest.logprobs": 2,
    "top_logprobs": 2,
    "prompt_logprobs": 1,
    "logprob_token_ids": [97],
    "echo": True,
    "use_beam_search": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "truncate_prompt_tokens": 3,
    "truncation_side": "right",
    "include_stop_str_in_output": True,
    "response_format": SHAPE,
    "structured_outputs": {"regex": "a"},
    "text": {"format": {"type": "json_object"}},
    "output_config": {"effort": "low"},
    "priority": -1,
    "cache_salt": "mine",
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "return_prompt_text": True,
    "return_token_strs": True,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "documents": [{"title": "it", "text": "so"}],
    "reasoning_effort": "low",
    "reasoning": {"effort": "low"},
    "thinking": {"type": "enabled"},
    "chat_template_kwargs": {"shade": "blue"},
    "tools": TOOL,
    "ResponsesRequest.tools": [{"type": "function", **FUNCTION}],
    "AnthropicMessagesRequest.tools": [{"name": "look", "input_schema": FUNCTION["parameters"]}],
    "AnthropicCountTokensRequest.tools": [{"name": "look", "input_schema": FUNCTION["parameters"]}],
    "ResponsesRequest.metadata": {"a": "b"},
    "include": INCLUDED,
    "enable_response_messages": True,
    "CompletionRequest.add_special_tokens": False,
    "TokenizeCompletionRequest.add_special_tokens": False,
    "TokenizeChatRequest.add_special_tokens": True,
}
"""Values that change something, by field, or by model and field."""

BESIDE: Final[Mapping[str, dict[str, Any]]] = {
    "top_logprobs": {"logprobs": True},
    "ResponsesRequest.top_logprobs": {"include": INCLUDED},
    "logprob_token_ids": {"logprobs": 1},
    "ChatCompletionRequest.logprob_token_ids": {"logprobs": True},
    "ChatCompletionRequest.echo": {"messages": BEGUN},
    "continue_final_message": {"messages": BEGUN, "add_generation_prompt": False},
    "stream_options": {"stream": True},
    "truncation_side": {"truncate_prompt_tokens": 3},
    "include_stop_str_in_output": {"stop": LETTERS},
    "return_tokens_as_token_ids": {"logprobs": 1},
    "ChatCompletionRequest.return_tokens_as_token_ids": {"logprobs": True},
    "AnthropicMessagesRequest.chat_template_kwargs": {"thinking": {"type": "disabled"}},
}
"""What a field needs beside it, to mean something."""

REFUSED: Final[Mapping[str, Any]] = {
    "thinking_token_budget": 5,
    "watermarking": True,
    "spaces_between_special_tokens": False,
    "ChatCompletionRequest.add_special_tokens": True,
    "media_io_kwargs": {"image": {"mode": "L"}},
    "mm_processor_kwargs": {"num_crops": 4},
    "return_weight_versions": True,
    "routed_experts_prompt_start": 2,
    "return_token_offsets": True,
    "kv_transfer_params": {"do_remote_decode": True},
    "ec_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "repetition_detection": {"max_pattern_size": 3},
    "stream_interval": 5,
    "suffix": "the end",
    "prompt_embeds": ["AAAA"],
    "background": True,
    "max_tool_calls": 1,
    "previous_response_id": "resp_1",
    "ResponsesRequest.prompt": {"id": "a"},
    "ResponsesRequest.include_reasoning": False,
    "truncation": "auto",
    "previous_input_messages": [{"role": "user", "content": "hi"}],
}
"""Values that ask for what is not here."""

ELSEWHERE: Final[Mapping[str, str]] = {
    "model": "tests/router/test_several_models.py",
    "request_id": "tests/router/api/http/test_wishes.py",
    "session_id": "tests/router/api/http/test_sessions.py",
    "prompt_cache_key": "tests/router/api/http/test_sessions.py",
    "skip_special_tokens": "tests/router/api/test_messages_by_api.py",
    "chat_template": "tests/router/api/test_messages_by_api.py",
    "tool_choice": "tests/router/api/http/test_tools.py",
    "parallel_tool_calls": "tests/router/api/http/test_tools.py",
    "include_reasoning": "tests/router/api/http/test_tools.py",
    "length_penalty": "tests/router/requests/test_beam_search.py",
}
"""Fields of which a fake replica shows nothing, and the tests of them."""

NO_EFFECT: Final = frozenset(
    """
    user store metadata service_tier safety_identifier prompt_cache_options prompt_cache_retention
    mm_payload return_mm_kwargs
    """.split()  # noqa: SIM905
)
"""They are the caller's own notes, or tell of media, which no prompt here has: no answer depends on them."""


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    """Has fake replicas answer small letters of the bundled tokenizer."""
    (first,) = tokenizer().encode("a", add_special_tokens=False)
    said = lambda prompt, seed, index: first + (sum(prompt) + seed + 7 * index) % 26  # noqa: E731
    monkeypatch.setattr("tests.fakes.fake_token", said)


@cache
def tokenizer() -> Tokenizer:
    """The bundled model's, which adds a first token, with a template that shows all that it is given."""
    loaded, path = Tokenizer.load(str(DEMO)), DEMO / "tokenizer.json"
    named = loaded.special_tokens
    return Tokenizer(loaded._codec, special_tokens=named, chat_template=TEMPLATE, json_path=path)


@cache
def named() -> Mapping[str, list[str]]:
    """The fields of each model."""
    parts = re.split(r"^\[(\w+)\]$", (Path(__file__).with_name("vllm_fields.txt")).read_text(), flags=re.MULTILINE)
    return {model: names.split() for model, names in zip(parts[1::2], parts[2::2], strict=True)}


def of(table: Mapping[str, Any], model: str, name: str) -> Any:
    return table.get(f"{model}.{name}", table.get(name))


def pairs() -> Iterator[tuple[str, str]]:
    return ((model, name) for model in MODELS for name in named()[model])


def verdict(model: str, name: str) -> str:
    """What is said of a field of a model itself goes before what is said of its name."""
    tables = {"works": WORKS, "refused": REFUSED, "elsewhere": ELSEWHERE}
    for key in (f"{model}.{name}", name):
        if found := [message for message, table in tables.items() if key in table]:
            (only,) = found
            return only
    assert name in NO_EFFECT, f"nothing is said of {model}.{name}"
    return "no effect"


@pytest.mark.parametrize("model", MODELS)
def test_something_is_said_of_every_field(model: str):
    for name in named()[model]:
        if verdict(model, name) == "elsewhere":
            assert re.search(rf"\b{name}\b", (ROOT / ELSEWHERE[name]).read_text()), name


@asynccontextmanager
async def api():
    replica = await FakeReplica.start(step_s=0.0)
    replica.vocab_size = tokenizer().vocab_size
    async with (
        site(replica, load_tokenizer=lambda _: tokenizer(), http=True) as place,
        client_of(place) as client,
    ):
        yield client, replica


async def seen(client: Any, replica: FakeReplica, path: str, body: Mapping[str, Any], name: str) -> tuple[str, str]:
    """What a replica got and what was answered, without ids and times, and without what only repeats the field."""
    before = len(replica.submits)
    answer = await client.post(path, json={"model": "fake", **body})
    assert answer.status_code == 200, f"{name}: {answer.text}"
    submits = replica.submits[before:]
    for submit in submits:
        for passing in ("request_id", "attempt", "time_left_ms"):
            submit.ClearField(passing)
    text = re.sub(r'"(id|created|created_at|item_id)": ?("[^"]*"|\d+)', '"": 0', answer.text)
    text = re.sub(r'"(\w*time\w*)": ?[0-9.e-]+', r'"\1": 0', text)
    if not body.get("stream") and name != "metadata":
        text = json.dumps({key: value for key, value in json.loads(text).items() if key != name})
    return "".join(map(str, submits)), text


@pytest.mark.parametrize("model", MODELS)
@on_a_loop
async def test_what_is_said_to_work_changes_something(model: str):
    path, base = MODELS[model]
    async with api() as (client, replica):
        for name in named()[model]:
            if verdict(model, name) != "works":
                continue
            body = {**base, **(of(BESIDE, model, name) or {})}
            without = {other: value for other, value in body.items() if other != name or other in MODELS[model][1]}
            plain = await seen(client, replica, path, without, name)
            assert await seen(client, replica, path, without, name) == plain, f"{model}.{name}: not comparable"
            changed = await seen(client, replica, path, {**body, name: of(WORKS, model, name)}, name)
            assert changed != plain, f"{model}.{name} changes nothing"


@pytest.mark.parametrize("model", MODELS)
@on_a_loop
async def test_what_is_not_here_is_refused_by_name(model: str):
    path, base = MODELS[model]
    async with api() as (client, _):
        for name in named()[model]:
            if verdict(model, name) == "refused":
                body = {"model": "fake", **base, name: of(REFUSED, model, name)}
                answer = await client.post(path, json=body)
                assert answer.status_code == 400, f"{model}.{name}: {answer.text}"
                assert answer.json()["error"]["message"].startswith(name), answer.text
                neutral = await client.post(path, json={**body, name: None})
                assert neutral.status_code == 200, f"{model}.{name} = null: {neutral.text}"


NO_OBJECT: Final = ("x", 7, -1.5, True, [1])
WRONG: Final[Mapping[str, tuple[Any, ...]]] = {
    "structured_outputs": NO_OBJECT,
    "response_format": (*NO_OBJECT, {}, {"a": 1}),
    "chat_template_kwargs": NO_OBJECT,
    "documents": ("x", 7, {"a": 1}),
    "logit_bias": NO_OBJECT,
    "stop": (7, {"a": 1}, [1]),
    "stop_sequences": (7, {"a": 1}, [1]),
    "stream_options": NO_OBJECT,
    "tools": ("x", 7, {"a": 1}, [1], [{"a": 1}]),
    "text": NO_OBJECT,
    "output_config": NO_OBJECT,
    "seed": ("x", 1.5, [1], {}),
    "max_tokens": ("x", 1.5, [1], {}),
    "bad_words": (7, {"a": 1}, [1]),
    "allowed_token_ids": ("x", 7, {"a": 1}, ["x"]),
}
"""Values that mean nothing, by field."""


@pytest.mark.parametrize("model", MODELS)
@on_a_loop
async def test_a_value_that_means_nothing_is_refused_by_name(model: str):
    path, base = MODELS[model]
    async with api() as (client, _):
        for name in WRONG.keys() & set(named()[model]):
            for value in WRONG[name]:
                body = {"model": "fake", **base, **(of(BESIDE, model, name) or {}), name: value}
                answer = await client.post(path, json=body)
                assert answer.status_code == 400, f"{model}.{name} = {value}: {answer.text}"
                assert name in answer.json()["error"]["message"], answer.text


def test_fields_of_sampling_params_and_engine_arguments_are_known():
    known = PARAMETERS.keys() | SAMPLING_FIELDS.keys() | {"output_kind"}
    assert set(named()["SamplingParams"]) <= known
    structures = StructuredOutputs.__dataclass_fields__.keys() | STRUCTURE_FIELDS.keys()
    assert set(named()["StructuredOutputsParams"]) <= structures
    assert set(named()["EngineArgs"]) <= DEFAULTS.keys()
