"""Endpoint `/v1/messages`: a chat in Anthropic's shape, answered whole or as its stream of events; and token counts.

What may not live here: the HTTP server (`app.py`), OpenAI's shapes (`chat_completions.py`).
"""

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from holdfast.router.chat import Chat, flat_message
from holdfast.router.doors.http.bodies import Reads
from holdfast.router.doors.http.sampling import declared_params
from holdfast.router.events import Usage
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.answer import CompletedRequest, SampledAnswer
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import FinishReason

_STOP_REASONS: Final = {FinishReason.LENGTH: "max_tokens"}


class MessagesBody(Reads):
    """`POST /v1/messages`."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **Reads.neutral,
        "tools": ([],),
        "tool_choice": ({"type": "auto"}, {"type": "none"}),
        "thinking": ({"type": "disabled"},),
        "mcp_servers": ([],),
        "container": (),
    }

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: Annotated[int, Field(ge=1)]
    """Asked for by Anthropic's protocol."""
    stop_sequences: list[str] | None = None
    stream: bool | None = None


class CountBody(MessagesBody):
    """`POST /v1/messages/count_tokens`: the same, without a length."""

    max_tokens: Annotated[int, Field(ge=1)] = 1


def messages_chat(body: MessagesBody) -> Chat:
    """The conversation, with the system prompt as its first message."""
    messages = [flat_message(message) for message in body.messages]
    if body.system:
        messages.insert(0, flat_message({"role": "system", "content": body.system}))
    return Chat(messages=messages)


def messages_request(body: MessagesBody, tenant: str = "") -> GenerationRequest:
    """The request that a body makes. Raises `InvalidRequestError`, naming the field."""
    own: dict[str, Any] = {"max_tokens": body.max_tokens}
    if body.stop_sequences:
        own["stop"] = body.stop_sequences
    params = declared_params(body, **own)
    if any(not isinstance(message.get("role"), str) for message in body.messages):
        raise InvalidRequestError("messages", len(body.messages), "must each have a role")
    return GenerationRequest(chat=messages_chat(body), model=body.model or "", sampling_params=params, tenant=tenant)


def whole_message(completed: CompletedRequest) -> dict[str, Any]:
    """The whole response."""
    output = completed.completions[0].output
    return {
        **_message(completed.request_id, completed.model),
        "content": [{"type": "text", "text": output.text}],
        "stop_reason": _stop_reason(output.finish_reason),
        "usage": _usage(completed.usage),
    }


async def message_events(answer: SampledAnswer) -> AsyncGenerator[bytes, None]:
    """The events of a stream: one text block between the message's beginning and its end."""
    num_tokens, has_begun = 0, False
    async for delivery in answer:
        if not has_begun:
            has_begun = True
            usage = Usage(
                num_prompt_tokens=len(answer.prompt_token_ids),
                num_completion_tokens=0,
                num_cached_tokens=delivery.num_cached_tokens,
            )
            message = {**_message(answer.request_id, answer.model), "content": [], "usage": _usage(usage)}
            yield _event("message_start", {"message": message})
            yield _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
        num_tokens += len(delivery.token_ids)
        if delivery.text:
            delta = {"type": "text_delta", "text": delivery.text}
            yield _event("content_block_delta", {"index": 0, "delta": delta})
        if delivery.finish_reason is not None:
            yield _event("content_block_stop", {"index": 0})
            ended = {"stop_reason": _stop_reason(delivery.finish_reason), "stop_sequence": None}
            yield _event("message_delta", {"delta": ended, "usage": {"output_tokens": num_tokens}})
    yield _event("message_stop", {})


def _message(request_id: str, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{request_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stop_reason(reason: FinishReason | None) -> str:
    """Of a stop string and an end of sequence alike the end of the turn: a replica does not say which it was."""
    return _STOP_REASONS.get(reason or FinishReason.STOP, "end_turn")


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _event(kind: str, fields: Mapping[str, Any]) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False).encode(errors="replace")
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
