"""Tools and reasoning through OpenAI's own client: calls whole and in pieces, forced calls, thoughts apart."""

import json
from pathlib import Path

import openai
import pytest

from holdfast.router.api.chat_answer import ChatPlan
from holdfast.router.api.http.bodies import ChatBody
from holdfast.router.api.http.chat_completions import chat_request
from holdfast.router.api.http.errors import http_error
from holdfast.router.request import GenerationRequest
from holdfast.router.text.grammar import GrammarCompiler
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.tools.chat_style import ChatStyle
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.structured_outputs import StructuredOutputs
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.site import site

DEMO = Path(__file__).parents[4] / "cluster/bundled_model/model"
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}{# <think> </think> #}"
)
ASKED = [{"role": "user", "content": "weather?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
def script(monkeypatch):
    """What a replica writes, whatever it is asked; `!` stands for its end."""

    def write(text: str) -> None:
        said = list((text + "!" * 500).encode())
        monkeypatch.setattr("tests.fakes.fake_token", lambda prompt, seed, index: said[min(index, len(said) - 1)])

    return write


async def ask(stream: bool = False, prompts: list | None = None, **fields):
    """The first choice of an answer; a streamed one is put together as clients do."""
    replica = await FakeReplica.start()
    asked = {"model": "fake", "messages": ASKED, "max_tokens": 400, "stop": ["!"], **fields}
    async with site(replica, load_tokenizer=lambda path: byte_tokenizer(path, TEMPLATE), http=True) as place:
        base_url = f"http://{place.router.http_address}/v1"
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=plain) as client:
            if not stream:
                return (await client.chat.completions.create(**asked)).choices[0]
            async with client.chat.completions.stream(**asked) as events:
                return (await events.get_final_completion()).choices[0]


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_a_call_is_told_apart_from_content(stream, script):
    script("Let me see. " + CALL + CALL)
    choice = await ask(stream, tools=TOOLS)
    assert choice.message.content.strip() == "Let me see."
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Oslo"}] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_thoughts_are_apart_from_the_answer(stream, script):
    script("<think>hm, so</think>\n\nIt rains.")
    choice = await ask(stream)
    assert choice.message.content == "It rains."
    assert choice.message.reasoning.strip() == choice.message.reasoning_content.strip() == "hm, so"
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_thoughts_are_not_sent_where_they_are_not_wanted(stream, script):
    script("<think>hm, so</think>\n\nIt rains.")
    message = (await ask(stream, extra_body={"include_reasoning": False})).message
    assert message.content == "It rains."
    assert getattr(message, "reasoning", None) is None


@on_a_loop
async def test_without_calls_an_answer_with_tools_is_content(script):
    script("It rains, {as always}.")
    choice = await ask(tools=TOOLS)
    assert (choice.message.content, choice.message.tool_calls) == ("It rains, {as always}.", None)
    assert choice.finish_reason == "stop"


@on_a_loop
async def test_no_calls_are_read_where_none_are_wanted(script):
    script(CALL)
    choice = await ask(tools=TOOLS, tool_choice="none")
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)


@on_a_loop
async def test_a_conversation_with_calls_and_results_is_rendered(script):
    script("fine")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]
    assert (await ask(messages=turns, tools=TOOLS)).message.content == "fine"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS * 2}, "tools[1].function.name"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
    ],
)
@on_a_loop
async def test_tools_that_are_wrong_are_refused_by_name(fields, param, script):
    script("no")
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(**fields)
    assert refused.value.param == param


def wish(**fields) -> GenerationRequest:
    return chat_request(ChatBody.read(json.dumps({"messages": ASKED, **fields}).encode()))


@pytest.mark.parametrize(
    "shape",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["yes"]}},
        {"guided_json": {"type": "object"}},
        {"guided_regex": "a+"},
    ],
)
@on_a_loop
async def test_a_shape_in_any_spelling_has_no_thoughts(shape):
    """Its text is what the grammar says, so nothing of it may be taken for reasoning."""

    class Requests:
        def chat_style(self, model: str, **_: object) -> ChatStyle:
            return ChatStyle.of(byte_tokenizer("", TEMPLATE), TEMPLATE)

        async def render(self, model: str, chat: object) -> str:
            return "<think>"

        async def apart(self, function, *arguments):
            return function(*arguments)

    plain, shaped = [await ChatPlan.of(wish(**fields), Requests()) for fields in ({}, shape)]
    assert plain.new_reader() is not None
    assert shaped.new_reader() is None


@on_a_loop
async def test_a_schema_that_cannot_be_enforced_is_named_as_it_stands_in_the_request():
    compiler = GrammarCompiler(Tokenizer.load(str(DEMO)))

    class Requests:
        def chat_style(self, model: str, **_: object) -> ChatStyle:
            return ChatStyle(call_format="hermes")

        async def render(self, model: str, chat: object) -> str:
            return ""

        async def apart(self, function, *arguments):
            return function(*arguments)

        async def check_structure(self, model: str, structure: StructuredOutputs) -> None:
            compiler.compile(structure)

    wrong = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}, "required": ["x"]}
    tools = [*TOOLS, {"type": "function", "function": {"name": "wrong", "parameters": wrong, "strict": True}}]
    for choice in ("required", {"type": "function", "function": {"name": "wrong"}}, "auto"):
        with pytest.raises(InvalidRequestError) as refused:
            await ChatPlan.of(wish(tools=tools, tool_choice=choice), Requests())
        assert http_error(refused.value).param == "tools[1].function.parameters"
    fine = wish(tools=TOOLS, tool_choice="required")
    assert (await ChatPlan.of(fine, Requests())).request.sampling_params.structure is not None


@on_a_loop
async def test_no_chunk_says_nothing_while_a_call_is_held_and_no_token_is_lost(script):
    script(CALL)
    replica = await FakeReplica.start()
    asked = {"model": "fake", "messages": ASKED, "max_tokens": 400, "stop": ["!"], "tools": TOOLS, "logprobs": True}
    async with site(replica, load_tokenizer=lambda path: byte_tokenizer(path, TEMPLATE), http=True) as place:
        base_url = f"http://{place.router.http_address}/v1"
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=plain) as client:
            extra = {"return_token_ids": True}
            chunks = [
                item async for item in await client.chat.completions.create(**asked, stream=True, extra_body=extra)
            ]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    said = [bool(choice.delta.model_dump(exclude_none=True)) or choice.finish_reason is not None for choice in choices]
    assert all(said), choices
    token_ids = [token_id for choice in choices for token_id in (choice.model_extra or {}).get("token_ids") or ()]
    assert bytes(token_ids).decode().startswith(CALL)


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_one_call_where_calls_are_not_parallel(stream, script):
    script("So. " + CALL + CALL)
    choice = await ask(stream, tools=TOOLS, parallel_tool_calls=False)
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert choice.message.content.strip() == "So."
    assert choice.finish_reason == "tool_calls"
