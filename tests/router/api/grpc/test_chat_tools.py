"""Chats with tools, thoughts and shapes over gRPC: by the stubs, by our client, and resumed at every chunk."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.router.generation import ChatOutput, ToolCall
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.v1 import inference_pb2 as pb
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.site import collected, refusal, site

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{{ m.tool_call_id or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}{# <think> </think> #}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = pb.Tool(name="weather", description="of a city", parameters=json.dumps(SCHEMA))
OPENAI_TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
BONN = '{"city": "Bonn"}'
ASKED = [pb.ChatMessage(role="user", content="weather?")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SAID = "<think>hm, so</think>\n\nLet me see. " + CALL + CALL


@pytest.fixture
def script(monkeypatch):
    """What a replica writes, whatever it is asked; `!` stands for its end."""

    def write(text: str) -> None:
        said = list((text + "!" * 500).encode())
        monkeypatch.setattr("tests.fakes.fake_token", lambda prompt, seed, index: said[index])

    return write


def chat_site(replica: FakeReplica):
    return site(replica, load_tokenizer=lambda path: byte_tokenizer(path, TEMPLATE))


@pytest.fixture
def with_grammars(tmp_path: Path) -> Callable[[str], Tokenizer]:
    """Loads a tokenizer of bytes that grammars can be compiled for: they need a tokenizer.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return lambda path: Tokenizer.load(str(tmp_path))


def ask(**fields: object) -> pb.GenerateRequest:
    params = fields.pop("sampling_params", None) or pb.SamplingParams(max_tokens=400, stop=["!"], seed=1)
    request = {name: fields.pop(name) for name in ("resume", "request_id", "attempt") if name in fields}
    chat = pb.Chat(**({"messages": ASKED, "tools": [TOOL], "now_s": 0} | fields))
    return pb.GenerateRequest(chat=chat, sampling_params=params, **request)


def joined(chunks) -> dict:
    """What the deltas of a stream make together."""
    calls: dict[int, dict] = {}
    for delta in (call for chunk in chunks for call in chunk.chat.tool_calls):
        call = calls.setdefault(delta.index, {"id": delta.id, "name": delta.name, "arguments": ""})
        call["arguments"] += delta.arguments
    return {
        "reasoning": "".join(chunk.chat.reasoning for chunk in chunks),
        "content": "".join(chunk.chat.content for chunk in chunks),
        "calls": list(calls.values()),
    }


@on_a_loop
async def test_thoughts_content_and_calls_are_told_apart_whole_and_streamed(script):
    script(SAID)
    async with chat_site(await FakeReplica.start()) as place:
        (completion,) = (await place.stub.Generate(ask(request_id="r"))).completions
        chunks = await collected(place.stub.GenerateStream(ask(request_id="r")))
    said, message = completion.chat, joined(chunks)
    assert completion.text == SAID == "".join(chunk.text for chunk in chunks)
    assert (said.reasoning.strip(), said.content.strip()) == ("hm, so", "Let me see.")
    assert [(call.name, json.loads(call.arguments)) for call in said.tool_calls] == [("weather", {"city": "Oslo"})] * 2
    assert len({call.id for call in said.tool_calls}) == 2
    assert message == {
        "reasoning": said.reasoning,
        "content": said.content,
        "calls": [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in said.tool_calls],
    }


@on_a_loop
async def test_the_template_reads_tools_earlier_calls_and_their_results(script):
    script("sunny")
    replica = await FakeReplica.start()
    turns = [
        *ASKED,
        pb.ChatMessage(
            role="assistant", tool_calls=[pb.ToolCall(id="1", name="weather", arguments='{"city": "Bonn"}')]
        ),
        pb.ChatMessage(role="tool", content="21", tool_call_id="1"),
    ]
    async with chat_site(replica) as place:
        await place.stub.Generate(ask(messages=turns))
    prompt = bytes(replica.submits[0].prompt_token_ids).decode()
    assert prompt == "[weather]<user>weather?<assistant><tool_call>Bonn</tool_call><tool>211<a>"


@pytest.mark.parametrize("stride", [29, pytest.param(3, marks=pytest.mark.slow)])
@on_a_loop
async def test_a_stream_that_is_resumed_at_any_chunk_says_the_same(stride, script):
    script(SAID)
    async with chat_site(await FakeReplica.start(step_s=0.0)) as place:
        whole = await collected(place.stub.GenerateStream(ask(request_id="r", attempt=1)))
        for cut in range(0, len(whole), stride):
            received = whole[:cut]
            progress = pb.SequenceProgress(
                token_ids=[token for chunk in received for token in chunk.token_ids],
                text_length=sum(len(chunk.text) for chunk in received),
            )
            fingerprint = received[-1].system_fingerprint if received else ""
            resume = pb.Resume(sequences=[progress], system_fingerprint=fingerprint)
            rest = await collected(place.stub.GenerateStream(ask(request_id="r", attempt=2, resume=resume)))
            assert joined([*received, *rest]) == joined(whole), f"cut at chunk {cut}"


@on_a_loop
async def test_a_named_tool_becomes_a_grammar(with_grammars):
    replica = await FakeReplica.start()
    async with site(replica, load_tokenizer=with_grammars) as place:
        params = pb.SamplingParams(max_tokens=4)
        await place.stub.Generate(ask(tool_choice=pb.ToolChoice(name="weather"), sampling_params=params))
        assert "weather" in replica.submits[-1].sampling_params.grammar
        await place.stub.Generate(ask(sampling_params=params))
        assert replica.submits[-1].sampling_params.grammar == ""


@on_a_loop
async def test_with_tools_that_must_not_be_called_there_are_no_calls(script):
    script(CALL)
    replica = await FakeReplica.start()
    async with chat_site(replica) as place:
        none = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)
        (completion,) = (await place.stub.Generate(ask(tool_choice=none))).completions
        assert (completion.chat.content, list(completion.chat.tool_calls)) == (CALL, [])
        assert replica.submits[-1].sampling_params.grammar == ""


@on_a_loop
async def test_thoughts_alone_can_be_asked_for_and_otherwise_the_text_is_all(script):
    script("<think>hm</think>\n\nIt rains.")
    async with chat_site(await FakeReplica.start()) as place:
        (split,) = (await place.stub.Generate(ask(tools=[], split_reasoning=True))).completions
        assert (split.chat.reasoning.strip(), split.chat.content) == ("hm", "It rains.")
        (plain,) = (await place.stub.Generate(ask(tools=[]))).completions
        assert not plain.HasField("chat")
        assert all(not chunk.HasField("chat") for chunk in await collected(place.stub.GenerateStream(ask(tools=[]))))


@on_a_loop
async def test_a_chat_may_have_a_shape(with_grammars):
    replica = await FakeReplica.start()
    async with site(replica, load_tokenizer=with_grammars) as place:
        shape = pb.StructuredOutputs(json=json.dumps(SCHEMA))
        params = pb.SamplingParams(max_tokens=40, seed=1, structured_outputs=shape)
        await place.stub.Generate(ask(tools=[], sampling_params=params))
        assert "city" in replica.submits[-1].sampling_params.grammar
        forced = ask(sampling_params=params, tool_choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED))
        refused = await refusal(place.stub.Generate(forced))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "sampling_params.structured_outputs")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [pb.Tool(name="what is this")]}, "chat.tools[0].function.name"),
        ({"tools": [pb.Tool(name="a", parameters="{")]}, "chat.tools[0].parameters"),
        ({"tools": [pb.Tool(name="a"), pb.Tool(name="a")]}, "chat.tools[1].function.name"),
        ({"tool_choice": pb.ToolChoice(name="other")}, "chat.tool_choice.function.name"),
        ({"tool_choice": pb.ToolChoice(mode=77)}, "chat.tool_choice.mode"),
        ({"sampling_params": pb.SamplingParams(echo=True)}, "sampling_params.echo"),
        ({"tools": [], "tool_choice": pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)}, "chat.tool_choice"),
        ({"template": "rag"}, "chat_template"),
    ],
)
@on_a_loop
async def test_what_is_wrong_is_refused_by_name(fields, field):
    async with chat_site(await FakeReplica.start()) as place:
        for call in (place.stub.Generate, lambda request: collected(place.stub.GenerateStream(request))):
            refused = await refusal(call(ask(**fields)))
            assert (refused.code, refused.field) == ("INVALID_ARGUMENT", field)


@on_a_loop
async def test_a_template_that_writes_calls_in_a_way_that_is_not_known_is_refused():
    async with site(await FakeReplica.start(), load_tokenizer=lambda p: byte_tokenizer(p, "{{ messages }}")) as place:
        refused = await refusal(place.stub.Generate(ask()))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "chat.tools")


@on_a_loop
async def test_our_client_takes_tools_in_openais_shape_and_gives_calls(script):
    script(SAID)
    turns = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
            ],
        },
        {"role": "tool", "content": "21", "tool_call_id": "1"},
    ]
    replica = await FakeReplica.start()
    params = SamplingParams(max_tokens=400, stop=["!"], seed=1)
    async with chat_site(replica) as place, AsyncClient(place.router.address) as client:
        answer = await client.generate(messages=turns, params=params, tools=[OPENAI_TOOL], request_id="r")
        chunks = [
            piece async for piece in client.stream(None, params, messages=turns, tools=[OPENAI_TOOL], request_id="r")
        ]
        with pytest.raises(InvalidRequestError, match=r"tools = .*messages alone"):
            await client.generate("x", tools=[OPENAI_TOOL])
    chat = answer.completions[0].chat
    assert isinstance(chat, ChatOutput)
    assert [call.name for call in chat.tool_calls] == ["weather", "weather"]
    assert isinstance(chat.tool_calls[0], ToolCall)
    assert joined(chunks)["calls"][1]["id"] == chat.tool_calls[1].id
    assert (
        bytes(replica.submits[0].prompt_token_ids)
        .decode()
        .startswith("[weather]<user>weather?<assistant><tool_call>Bonn")
    )


@on_a_loop
async def test_our_client_aborts_by_id_whichever_router_runs_it():
    replica = await FakeReplica.start()
    async with chat_site(replica) as place, AsyncClient([place.router.address, "127.0.0.1:1"]) as client:
        stream = client.stream("hello", SamplingParams(max_tokens=50_000), request_id="long")
        await anext(stream)
        assert await client.abort("long")
        *_, last = [piece async for piece in stream]
        assert last.finish_reason == "abort"
        async with AsyncClient(place.router.address) as alone:
            assert not await alone.abort("long")
            with pytest.raises(InvalidRequestError, match="request_id"):
                await alone.abort("")
