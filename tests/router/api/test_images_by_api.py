"""Images by API: a request with one is refused in every API, naming the field and what is there."""

from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.errors import InvalidRequestError
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.http.test_batches import CHATS, line, results, submitted, until_over
from tests.router.api.http.test_stored_responses import storing
from tests.router.api.open_inference.messages import infer, unary
from tests.router.api.test_messages_by_api import asked, say
from tests.router.api.vllm.test_generate import api, ask, told
from tests.router.site import refusal
from tests.router.text.sample_templates import HERMES

TEXT = {"type": "text", "text": "What is this?"}
OPENAI = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
RESPONSES = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [ANTHROPIC]}
USED = [say("user", "hi"), say("assistant", [{"type": "tool_use", "id": "c", "name": "look", "input": {}}])]
CALLED = [
    say("user", "hi"),
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [RESPONSES]},
]
DATA = {"image": "data:image/png;base64,AA=="}

OVER_HTTP: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a chat": (
        "/v1/chat/completions",
        {"messages": [say("user", [TEXT, OPENAI])]},
        "messages[0].content[1].type",
        "image_url",
    ),
    "sound in a chat": (
        "/v1/chat/completions",
        {"messages": [say("user", [SOUND])]},
        "messages[0].content[0].type",
        "input_audio",
    ),
    "a chat's field": ("/v1/chat/completions", {"messages": [say("user", "hi")], "images": ["AA=="]}, "images", ""),
    "a completion": ("/v1/completions", {"prompt": "hi", "multi_modal_data": DATA}, "multi_modal_data", ""),
    "a prompt that is none": (
        "/v1/completions",
        {"prompt": {"prompt": "hi", "multi_modal_data": DATA}},
        "prompt",
        "multi_modal_data",
    ),
    "one of several prompts": ("/v1/completions", {"prompt": ["hi", OPENAI]}, "prompt[1]", "image_url"),
    "a response": ("/v1/responses", {"input": [say("user", [RESPONSES])]}, "input[0].content[0].type", "input_image"),
    "a call's output": ("/v1/responses", {"input": CALLED}, "input[2].output[0].type", "input_image"),
    "a conversation": (
        "/v1/conversations",
        {"items": [say("user", [RESPONSES])]},
        "items[0].content[0].type",
        "input_image",
    ),
    "a message": (
        "/v1/messages",
        {"messages": [say("user", [TEXT, ANTHROPIC])], "max_tokens": 1},
        "messages[0].content[1].type",
        "image",
    ),
    "a system prompt": (
        "/v1/messages",
        {"messages": [say("user", "hi")], "system": [ANTHROPIC], "max_tokens": 1},
        "system[0].type",
        "image",
    ),
    "a tool's result": (
        "/v1/messages",
        {"messages": [*USED, say("user", [RESULT])], "max_tokens": 1},
        "messages[2].content[0].content[0].type",
        "image",
    ),
    "tokens to count": (
        "/v1/messages/count_tokens",
        {"messages": [say("user", [ANTHROPIC])]},
        "messages[0].content[0].type",
        "image",
    ),
    "tokens to see": (
        "/tokenize",
        {"messages": [say("user", [OPENAI])]},
        "chat.messages[0].content[0].type",
        "image_url",
    ),
    "an embedding": ("/v1/embeddings", {"input": [OPENAI]}, "input[0]", "image_url"),
    "an embedding of parts": ("/v1/embeddings", {"input": ["hi", DATA]}, "input[1]", "image"),
    "a class": ("/v1/classify", {"input": [OPENAI]}, "input[0]", "image_url"),
    "a score": ("/v1/score", {"text_1": "hi", "text_2": {"content": [OPENAI]}}, "text_2", "image_url"),
    "a rank": ("/v1/rerank", {"query": "hi", "documents": ["hi", DATA]}, "documents[1].text", "image"),
}
"""Path, body, the field that is refused, and what the error says is there; nothing where the field's name says it."""


@on_a_loop
async def test_a_request_with_an_image_is_refused_by_name_over_http():
    async with asked(HERMES) as (_, client, replica):
        for case, (path, body, field, kind) in OVER_HTTP.items():
            answer = await client.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), case
            assert error.get("param", field) == field, case
            begins = f"{field} must be text, not {kind!r}: models here read text alone" if kind else f"{field} must be "
            assert error["message"].startswith(begins), (case, error["message"])
        assert not replica.submits


@on_a_loop
async def test_a_request_with_an_image_is_refused_by_name_over_grpc():
    async with asked(HERMES) as (place, _, replica):
        async with AsyncClient(place.router.address) as ours:
            with pytest.raises(InvalidRequestError) as refused:
                await ours.generate(messages=[say("user", [TEXT, OPENAI])])
        assert (refused.value.field, refused.value.value) == ("chat.messages[0].content[1].type", "image_url")
        other = await refusal(unary(place, "ModelInfer")(infer(image=b"x")))
        assert other.code == "INVALID_ARGUMENT"
        assert "inputs[2].name must be one of text_input" in other.message.replace(" = 'image':", "")
        assert not replica.submits


@pytest.mark.parametrize("fields", [{"mm_inputs": vllm.MultimodalInputs()}, {"media_refs": vllm.MediaRefs()}])
@on_a_loop
async def test_a_request_with_an_image_is_refused_by_name_over_the_protocol_of_vllm(fields):
    async with api(await FakeReplica.start()) as (_, stub):
        answer = await refusal(told(stub.Generate(ask(**fields))))
        (field,) = fields
        assert (answer.code, answer.field) == ("INVALID_ARGUMENT", field)
        assert "models read text alone" in answer.message


@on_a_loop
async def test_a_line_with_an_image_is_refused_by_name_and_the_others_go_on(tmp_path):
    chats = [line("a"), line("b", messages=[say("user", [TEXT, OPENAI])]), line("c")]
    response = line("a", "/v1/responses", input=[say("user", [RESPONSES])])
    response["body"].pop("max_tokens")
    async with storing(tmp_path) as (_, client):
        for lines, endpoint, name, kind in (
            (chats, CHATS, "messages[0].content[1].type", "image_url"),
            ([response], "/v1/responses", "input[0].content[0].type", "input_image"),
        ):
            over = await until_over(client, (await submitted(client, lines, endpoint=endpoint)).id)
            assert (over.request_counts.completed, over.request_counts.failed) == (len(lines) - 1, 1)
            (refused,) = await results(client, over.error_file_id)
            assert refused["response"]["status_code"] == 400
            told = refused["response"]["body"]["error"]
            assert (told["param"], kind in told["message"]) == (name, True)
