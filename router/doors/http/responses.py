"""Endpoint `/v1/responses`: OpenAI's response objects for text, answered whole or as their stream of typed events.

Nothing is stored: a response cannot be fetched or continued by its id, and a request that asks for either is refused.
What may not live here: the HTTP server (`app.py`), parameters (`sampling.py`).
"""

import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from holdfast.router.chat import Chat, Message, flat_message
from holdfast.router.doors.http.bodies import Reads
from holdfast.router.doors.http.sampling import declared_params
from holdfast.router.events import Usage
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.answer import CompletedRequest, SampledAnswer
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import FinishReason
from holdfast.worker.structured_outputs import StructuredOutputs

_COMPLETED: Final = "completed"


class ResponsesBody(Reads):
    """`POST /v1/responses`."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **Reads.neutral,
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "tools": ([],),
        "tool_choice": ("auto", "none"),
        "top_logprobs": (0,),
        "include": ([],),
        "truncation": ("disabled",),
    }

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None


def responses_request(body: ResponsesBody, tenant: str = "") -> GenerationRequest:
    """The request that a body makes. Raises `InvalidRequestError`, naming the field."""
    own: dict[str, Any] = {"max_tokens": body.max_output_tokens}
    if (structure := _structure(body)) is not None:
        own["structured_outputs"] = structure
    effort = (body.reasoning or {}).get("effort")
    return GenerationRequest(
        chat=Chat(messages=_messages(body), template_kwargs={"reasoning_effort": effort} if effort else {}),
        model=body.model or "",
        sampling_params=declared_params(body, **own),
        tenant=tenant,
    )


def _messages(body: ResponsesBody) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        if item.get("type", "message") != "message":
            raise InvalidRequestError(f"input[{index}].type", item.get("type"), "must be message")
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append(flat_message({"role": role, "content": item.get("content")}))
    return messages


def _structure(body: ResponsesBody) -> StructuredOutputs | None:
    asked = (body.text or {}).get("format") or {"type": "text"}
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind == "json_schema" and isinstance(asked.get("schema"), Mapping):
        return StructuredOutputs(json=dict(asked["schema"]))
    raise InvalidRequestError("text.format", asked, "must be text, json_object, or json_schema with a schema")


def whole_response(body: ResponsesBody, completed: CompletedRequest) -> dict[str, Any]:
    """The whole response."""
    output = completed.completions[0].output
    made = _Response(body, completed.request_id, completed.model)
    return made.ended(output.text, output.finish_reason, completed.usage)


async def response_events(body: ResponsesBody, answer: SampledAnswer) -> AsyncGenerator[bytes, None]:
    """The events of a stream: one message with one text, from its creation to its end."""
    made = _Response(body, answer.request_id, answer.model)
    texts: list[str] = []
    async for delivery in answer:
        if not texts:
            for event in made.opening():
                yield event
        texts.append(delivery.text)
        if delivery.text:
            yield made.part_event("response.output_text.delta", {"delta": delivery.text, "logprobs": []})
        if delivery.finish_reason is not None and delivery.usage is not None:
            for event in made.closing("".join(texts), delivery.finish_reason, delivery.usage):
                yield event


class _Response:
    """One response object, and the numbered events that tell of it."""

    def __init__(self, body: ResponsesBody, request_id: str, model: str) -> None:
        self._item_id = f"msg_{request_id}"
        self._num_events = 0
        self._head: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "store": False,
            "temperature": body.given("temperature") or 1.0,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.given("top_p") or 1.0,
            "truncation": "disabled",
            "output": [],
            "usage": None,
        }

    def ended(self, text: str, reason: FinishReason | None, usage: Usage) -> dict[str, Any]:
        """The object at its end."""
        is_cut = reason is FinishReason.LENGTH
        return {
            **self._head,
            "status": "incomplete" if is_cut else _COMPLETED,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item("incomplete" if is_cut else _COMPLETED, [_text_part(text)])],
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
                "output_tokens": usage.num_completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
            },
        }

    def opening(self) -> list[bytes]:
        begun = {"response": {**self._head, "status": "in_progress"}}
        return [
            self._event("response.created", begun),
            self._event("response.in_progress", begun),
            self._event("response.output_item.added", {"output_index": 0, "item": self._item("in_progress", [])}),
            self.part_event("response.content_part.added", {"part": _text_part("")}),
        ]

    def closing(self, text: str, reason: FinishReason, usage: Usage) -> list[bytes]:
        ended = self.ended(text, reason, usage)
        return [
            self.part_event("response.output_text.done", {"text": text, "logprobs": []}),
            self.part_event("response.content_part.done", {"part": _text_part(text)}),
            self._event("response.output_item.done", {"output_index": 0, "item": ended["output"][0]}),
            self._event(f"response.{ended['status']}", {"response": ended}),
        ]

    def part_event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """An event of the message's text."""
        return self._event(kind, {"item_id": self._item_id, "output_index": 0, "content_index": 0, **fields})

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": content}

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        numbered = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        data = json.dumps(numbered, ensure_ascii=False).encode(errors="replace")
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
