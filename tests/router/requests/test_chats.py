"""Chats on a router: the template that lies with the tokenizer makes a prompt of the messages."""

import asyncio
from functools import partial

import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.client.blocking_client import Client
from holdfast.cluster.commands.cli import run
from holdfast.router.config import LimitsConfig
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import HoldfastError, InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.site import expected, refusal, site

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ (level or 0) + 1 }}"
)
HELLO = [{"role": "user", "content": "hello"}]
PARAMS = SamplingParams(max_tokens=8, seed=1)
chatty = partial(byte_tokenizer, chat_template=TEMPLATE)


def of_a_template(text: str) -> "partial[Tokenizer]":
    return partial(byte_tokenizer, chat_template=text)


@on_a_loop
async def test_a_chat_is_completed_as_the_prompt_that_the_template_makes():
    replica = await FakeReplica.start()
    async with site(replica, load_tokenizer=chatty) as place, AsyncClient(place.router.address) as client:
        for kwargs, prompt in (
            (None, "<user>hello<assistant>1"),
            ({"add_generation_prompt": False, "level": 2}, "<user>hello3"),
        ):
            _, text = expected(prompt, 1, 8)
            answer = await client.generate(messages=HELLO, chat_template_kwargs=kwargs, params=PARAMS)
            assert answer.completions[0].text == text
            chunks = [piece async for piece in client.stream(None, PARAMS, messages=HELLO, chat_template_kwargs=kwargs)]
            assert "".join(piece.text for piece in chunks) == text
        assert bytes(replica.submits[0].prompt_token_ids) == b"<user>hello<assistant>1"


@on_a_loop
async def test_echo_begins_with_what_the_template_made():
    async with site(await FakeReplica.start(), load_tokenizer=chatty) as place:
        async with AsyncClient(place.router.address) as client:
            params = SamplingParams(max_tokens=8, seed=1, echo=True)
            answer = await client.generate(messages=HELLO, params=params)
        assert answer.completions[0].text.startswith("<user>hello<assistant>1")


@on_a_loop
async def test_the_blocking_client_and_the_command_line_chat_as_well(capsys: pytest.CaptureFixture[str]):
    _, text = expected("<user>hello<assistant>1", 1, 8)
    async with site(await FakeReplica.start(), load_tokenizer=chatty) as place:

        def ask() -> None:
            with Client(place.router.address) as client:
                assert client.generate(messages=HELLO, params=PARAMS).completions[0].text == text
                assert "".join(piece.text for piece in client.stream(None, PARAMS, messages=HELLO)) == text
            command = ["generate", "hello", "--chat", "--server", place.router.address, "--seed", "1"]
            assert run([*command, "--max-tokens", "8"]) == 0

        await asyncio.to_thread(ask)
    assert capsys.readouterr().out == text + "\n"


def chat(*turns: tuple[str, str], **fields: object) -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages, **fields))


LONG = chat(*[("u", "")] * 100)
REFUSED = {
    "no messages": (chat(), "chat.messages", "at least one message"),
    "no role": (chat(("", "x")), "chat.messages[0].role", "must be a name"),
    "a role of control tokens": (chat(("user", "x"), ("a|><|b", "")), "chat.messages[1].role", "must be a name"),
    "refused by the template": (chat(("critic", "x")), "chat.messages", "no critics"),
    "a template that fails": (
        chat(("user", "x"), template_kwargs='{"level": "x"}'),
        "chat.messages",
        "template refuses",
    ),
    "what the template is given": (
        chat(("user", "x"), template_kwargs='{"messages": 1}'),
        "chat.template_kwargs",
        "set",
    ),
    "a time without a calendar": (chat(("user", "x"), now_s=2**60), "chat.now_s", "253402300799"),
    "larger than a text": (
        chat(("user", "x" * 300)),
        "chat.messages.content",
        "at most 200 bytes (limits.max_prompt_bytes)",
    ),
    "larger by its variables": (
        chat(("user", "x"), template_kwargs='{"x": "' + 300 * "y" + '"}'),
        "chat.template_kwargs",
        "at most 200 bytes",
    ),
    "larger once it is rendered": (LONG, "chat", "at most 200 bytes (limits.max_prompt_bytes)"),
}


@on_a_loop
async def test_bad_chats_are_refused_by_name():
    replica = await FakeReplica.start()
    async with site(replica, limits=LimitsConfig(max_prompt_bytes=200), load_tokenizer=chatty) as place:
        for name, (message, field, limit) in REFUSED.items():
            refused = await refusal(place.stub.Generate(message))
            assert (refused.code, refused.field) == ("INVALID_ARGUMENT", field), name
            assert limit in refused.message, name
            assert len(refused.message) < 500, name
        assert replica.submits == []


@on_a_loop
async def test_a_model_that_has_no_template_says_so_and_one_that_is_broken_is_the_models_fault():
    async with site(await FakeReplica.start()) as place:
        refused = await refusal(place.stub.Generate(chat(("user", "x"))))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "chat")
        assert "no chat template" in refused.message
    async with site(await FakeReplica.start(), load_tokenizer=of_a_template("{% for %}")) as place:
        refused = await refusal(place.stub.Generate(chat(("user", "x"))))
        assert (refused.code, refused.reason) == ("FAILED_PRECONDITION", "CONFIGURATION")


@on_a_loop
async def test_a_chat_without_tokens_is_refused():
    async with site(await FakeReplica.start(), load_tokenizer=of_a_template("")) as place:
        refused = await refusal(place.stub.Generate(chat(("user", "x"))))
        assert refused.field == "chat"
        assert "no tokens" in refused.message


@on_a_loop
async def test_a_chat_goes_on_at_another_router_with_the_prompt_that_it_had():
    """Both would say another time by their own clocks."""
    clock = of_a_template("{{ strftime_now('%s %f') }}")
    mine, other = await FakeReplica.start("a"), await FakeReplica.start("b")
    async with site(mine, load_tokenizer=clock) as first, site(other, load_tokenizer=clock) as second:
        num_chunks = 0
        async with AsyncClient([first.router.address, second.router.address], draw=lambda: 0.0) as client:
            async for _ in client.stream(None, SamplingParams(max_tokens=60, seed=1), messages=HELLO):
                num_chunks += 1
                if num_chunks == 5:
                    await first.router.stop()
        assert other.submits[0].output_token_ids
        assert other.submits[0].prompt_token_ids == mine.submits[0].prompt_token_ids


@on_a_loop
async def test_a_chat_is_resumed_only_if_it_says_when_it_was():
    async with site(await FakeReplica.start(), load_tokenizer=chatty) as place:
        message = chat(("user", "x"))
        message.request_id = "r"
        message.resume.sequences.add(token_ids=[1])
        call = place.stub.GenerateStream(message)
        refused = await refusal(call.read())
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "chat.now_s")


BAD_CALLS = (
    ({}, "prompt", "exactly one"),
    ({"prompt": "x", "messages": HELLO}, "prompt", "exactly one"),
    ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs", "messages alone"),
    ({"messages": []}, "chat.messages", "at least one"),
    ({"messages": [{"role": "user", "content": None}]}, "chat.messages[0].content", "must be text"),
    ({"messages": [{**HELLO[0], "mood": "x"}]}, "chat.messages[0]", "these fields alone"),
    ({"messages": HELLO, "chat_template_kwargs": {"x": {1, 2}}}, "chat.template_kwargs", "JSON"),
)


@on_a_loop
async def test_what_the_wire_has_no_place_for_is_refused_before_it_is_sent():
    async with AsyncClient("127.0.0.1:1") as client:
        for call, field, limit in BAD_CALLS:
            with pytest.raises(HoldfastError) as refused:
                await client.generate(**call)
            assert isinstance(refused.value, InvalidRequestError), call
            assert refused.value.field == field
            assert limit in refused.value.limit
