"""Endpoint `/v1/chat/completions`: a chat as OpenAI's clients send it, and its answer whole or as a stream of chunks.

What may not live here: fields (`bodies.py`), parameters (`sampling.py`), the HTTP server (`app.py`).
"""

import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from holdfast.router.chat import Chat
from holdfast.router.doors.http.bodies import ChatBody
from holdfast.router.doors.http.choices import (
    TokenText,
    chat_logprobs,
    finish_of,
    prompt_logprobs_of,
    usage_of,
)
from holdfast.router.doors.http.sampling import chat_params, priority_of
from holdfast.router.events import Deliver, Usage
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.answer import CompletedRequest, SampledAnswer
from holdfast.worker.errors import InvalidRequestError

DONE: Final = b"data: [DONE]\n\n"


def chat_request(body: ChatBody, tenant: str = "") -> GenerationRequest:
    """The request that a body makes. Raises `InvalidRequestError`, naming the field."""
    if body.tools:
        raise InvalidRequestError("tools", len(body.tools), "is not supported")
    variables = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    chat = Chat(messages=[flat_message(message) for message in body.messages], template_kwargs=variables)
    return GenerationRequest(
        chat=chat,
        model=body.model or "",
        sampling_params=chat_params(body),
        priority=priority_of(body),
        timeout_s=body.timeout,
        cache_salt=body.cache_salt or "",
        tenant=tenant,
    )


def flat_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its content as one text, where it is a list of texts. What is no text is refused."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(map(_text_of_part, content))}


def _text_of_part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise InvalidRequestError("messages.content", kind, "must be text: this model takes no other kind of input")


def chat_id(request_id: str) -> str:
    return f"chatcmpl-{request_id}"


def whole_chat(body: ChatBody, completed: CompletedRequest, text_of: TokenText) -> dict[str, Any]:
    """The whole response."""
    first = completed.completions[0].output
    response: dict[str, Any] = {
        "id": chat_id(completed.request_id),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": completed.model,
        "choices": [_whole_choice(body, item.output, text_of) for item in completed.completions],
        "usage": usage_of(completed.usage),
        "system_fingerprint": first.fingerprint or None,
        "service_tier": None,
    }
    if body.prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs_of(first.prompt_logprobs, text_of)
    return response


def _whole_choice(body: ChatBody, output: Deliver, text_of: TokenText) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": output.sequence_index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": chat_logprobs(output.logprobs, text_of),
        "finish_reason": finish_of(output.finish_reason),
    }
    if body.return_token_ids:
        choice["token_ids"] = list(output.token_ids)
    return choice


async def chat_events(body: ChatBody, answer: SampledAnswer, text_of: TokenText) -> AsyncGenerator[bytes, None]:
    """The events of a stream, the last of which says that it is done."""
    chunks = _Chunks(body, answer)
    async for delivery in answer:
        yield chunks.of(delivery, text_of)
        if delivery.usage is not None and body.tells_usage:
            yield chunks.usage(delivery.usage)
    yield DONE


class _Chunks:
    """Chunks of one stream. What all of them have in common is made once."""

    def __init__(self, body: ChatBody, answer: SampledAnswer) -> None:
        self._body = body
        self._num_prompt_tokens = len(answer.prompt_token_ids)
        self._head = {
            "id": chat_id(answer.request_id),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": answer.model,
        }
        self._has_begun: set[int] = set()
        self._fingerprint: str | None = None
        self._num_completion_tokens = 0

    def of(self, delivery: Deliver, text_of: TokenText) -> bytes:
        """The events of one delivery; a choice's first begins with its role."""
        self._num_completion_tokens += len(delivery.token_ids)
        if delivery.fingerprint != self._fingerprint:
            self._fingerprint = delivery.fingerprint
            self._head["system_fingerprint"] = delivery.fingerprint or None
        events = b""
        index = delivery.sequence_index
        if index not in self._has_begun:
            self._has_begun.add(index)
            events = self._event(index, {"role": "assistant", "content": ""}, None, None)
        logprobs = chat_logprobs(delivery.logprobs, text_of)
        extra: dict[str, Any] = {}
        if self._body.return_token_ids:
            extra["token_ids"] = list(delivery.token_ids)
        delta = {"content": delivery.text} if delivery.text else {}
        return events + self._event(index, delta, logprobs, finish_of(delivery.finish_reason), extra)

    def usage(self, usage: Usage) -> bytes:
        """The chunk after the last choice."""
        return event_of({**self._head, "choices": [], "usage": usage_of(usage)})

    def _event(
        self,
        index: int,
        delta: Mapping[str, object],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **(extra or {})}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._body.tells_usage_always:
            chunk["usage"] = usage_of(
                Usage(num_prompt_tokens=self._num_prompt_tokens, num_completion_tokens=self._num_completion_tokens)
            )
        elif self._body.tells_usage:
            chunk["usage"] = None
        return event_of(chunk)


def event_of(chunk: Mapping[str, Any]) -> bytes:
    """A server-sent event of an object."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n\n"
