"""Endpoint `/v1/responses`: OpenAI's response objects, answered whole or as their stream of typed events."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from holdfast.router.api.http.choices import (
    Block,
    BlockEvent,
    Blocks,
    TokenNames,
    cached_of,
    drafts_of,
    listed_logprobs,
    times_of,
)
from holdfast.router.api.http.responses_body import ResponsesBody
from holdfast.router.generation import Generation, OutputDelta, Usage
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.text.token_table import TokenTable
from holdfast.router.tools.chat_style import ChatReader
from holdfast.worker.request import FinishReason, TokenLogprob


class RawMessages:
    """Raw messages of one response, as its output comes."""

    def __init__(self, prompt_text: str, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = _message(prompt_text, prompt_token_ids)
        self._text = ""
        self._token_ids: list[int] = []

    def push(self, delta: OutputDelta) -> None:
        """Appends a delta's text and token ids."""
        self._text += delta.text
        self._token_ids += delta.token_ids

    def fields(self) -> dict[str, Any]:
        """Fields of the response object at its end."""
        return {"input_messages": [self._prompt], "output_messages": [_message(self._text, self._token_ids)]}


def _message(text: str, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}


_COMPLETED: Final = "completed"
_INCOMPLETE: Final = "incomplete"
_PREFIXES: Final = {"text": "msg", "thinking": "rs", "call": "fc"}
_PARTS: Final = {"text": "response.output_text", "thinking": "response.reasoning_text"}


def whole_response(
    body: ResponsesBody,
    completed: Generation,
    created: int,
    reader: ChatReader | None,
    tokens: TokenTable,
    raw: RawMessages | None = None,
    *,
    is_stored: bool = False,
) -> dict[str, Any]:
    """The whole response."""
    output, blocks = completed.completions[0], Blocks(reader)
    for _ in blocks.push(output):
        pass
    if raw is not None:
        raw.push(output)
    made = _Response(body, completed.request_id, completed.model, created, TokenNames(tokens), raw, is_stored)
    return made.ended(blocks, output.finish_reason, completed.usage)


def queued_response(
    body: ResponsesBody, request_id: str, model: str, created: int, tokens: TokenTable
) -> dict[str, Any]:
    """A response that is stored, before anything of it is computed."""
    return _Response(body, request_id, model, created, TokenNames(tokens), None, is_stored=True).begun("queued")


class ResponseEvents:
    """Writes the numbered events of one stream: its items, from the response's creation to its end."""

    def __init__(
        self,
        body: ResponsesBody,
        answer: SampledAnswer,
        created: int,
        reader: ChatReader | None,
        tokens: TokenTable,
        prompt_text: str | None = None,
        save: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
        *,
        is_stored: bool = False,
    ) -> None:
        """`prompt_text`: the prompt, where the response tells it and the output as the model has them. `save`: stores
        the response before its last event, which says whether it is stored.
        """
        self.num_events = 0
        self._raw = None if prompt_text is None else RawMessages(prompt_text, answer.request.prompt_token_ids)
        names, request_id = TokenNames(tokens), answer.request.request_id
        self._save = save
        self._made = _Response(body, request_id, answer.model, created, names, self._raw, is_stored)
        self._ended: dict[str, Any] | None = None
        self._blocks = Blocks(reader)
        self._has_begun = False
        self._holds = False

    def of(self, delta: OutputDelta) -> bytes:
        reason, block_events = delta.finish_reason, list(self._blocks.push(delta))
        if self._raw is not None:
            self._raw.push(delta)
        self._holds = not block_events and reason is None and bool(delta.logprobs)
        if self._holds:
            return b""
        events = b"" if self._has_begun else self._opening()
        events += b"".join(self._block_event(event, reason) for event in block_events)
        if reason is not None and delta.usage is not None:
            self._ended = self._made.ended(self._blocks, reason, delta.usage)
        return events

    def plain(self, delta: OutputDelta) -> None:
        return None

    def holds(self, choice: int) -> bool:
        """Whether log-probabilities wait for the text of their tokens."""
        return self._holds

    async def end(self) -> bytes:
        if (ended := self._ended) is None:
            return b""
        if self._save is not None:
            await self._save(ended)
        return self._event(f"response.{ended['status']}", {"response": ended})

    def _opening(self) -> bytes:
        self._has_begun = True
        begun = {"response": self._made.begun()}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def _block_event(self, event: BlockEvent, reason: FinishReason | None) -> bytes:
        block = event.block
        at: dict[str, Any] = {"item_id": self._made.item_id(block), "output_index": block.index}
        if event.what == "begin":
            return self._begin(block, at)
        if event.what == "end":
            return self._end(block, at, reason)
        if block.kind == "call":
            return self._event("response.function_call_arguments.delta", {**at, "delta": event.piece})
        more = {**at, "content_index": 0, "delta": event.piece}
        fields = {**more, "logprobs": self._made.logprobs(event.logprobs)}
        return self._event(f"{_PARTS[block.kind]}.delta", more if block.kind != "text" else fields)

    def _begin(self, block: Block, at: Mapping[str, Any]) -> bytes:
        item = self._made.item(block, "in_progress", is_begun=True)
        events = self._event("response.output_item.added", {"output_index": block.index, "item": item})
        if block.kind == "call":
            return events
        part = {**at, "content_index": 0, "part": self._made.part(block, is_begun=True)}
        return events + self._event("response.content_part.added", part)

    def _end(self, block: Block, at: Mapping[str, Any], reason: FinishReason | None) -> bytes:
        if block.kind == "call":
            done = {**at, "name": block.name, "arguments": block.text}
            events = self._event("response.function_call_arguments.done", done)
        else:
            said = {**at, "content_index": 0, "text": block.text}
            logprobs = {"logprobs": self._made.logprobs(block.logprobs)} if block.kind == "text" else {}
            events = self._event(f"{_PARTS[block.kind]}.done", {**said, **logprobs})
            part = {**at, "content_index": 0, "part": self._made.part(block)}
            events += self._event("response.content_part.done", part)
        item = self._made.item(block, _INCOMPLETE if reason is FinishReason.LENGTH else _COMPLETED)
        return events + self._event("response.output_item.done", {"output_index": block.index, "item": item})

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        numbered = {"type": kind, "sequence_number": self.num_events, **fields}
        self.num_events += 1
        data = json.dumps(numbered, ensure_ascii=False).encode(errors="replace")
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class _Response:
    """One response object and its items."""

    def __init__(
        self,
        body: ResponsesBody,
        request_id: str,
        model: str,
        created: int,
        names: TokenNames,
        raw: RawMessages | None,
        is_stored: bool,
    ) -> None:
        self._request_id = request_id
        self._raw = raw
        self._names = names
        self._head: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "background": body.background is True,
            "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
            "created_at": created,
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "store": is_stored,
            "temperature": _or_one(body.given("temperature")),
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": _or_one(body.given("top_p")),
            "truncation": "disabled",
            "output": [],
            "usage": None,
        }

    def begun(self, status: str = "in_progress") -> dict[str, Any]:
        return {**self._head, "status": status}

    def ended(self, made: Blocks, reason: FinishReason | None, usage: Usage) -> dict[str, Any]:
        """The object at its end."""
        is_cut = reason is FinishReason.LENGTH
        blocks = made.blocks
        last = len(blocks) - 1
        return {
            **self._head,
            "status": _INCOMPLETE if is_cut else _COMPLETED,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [
                self.item(block, _INCOMPLETE if is_cut and block.index == last else _COMPLETED) for block in blocks
            ],
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": cached_of(usage),
                "output_tokens": usage.num_completion_tokens,
                "output_tokens_details": {"reasoning_tokens": made.num_reasoning_tokens, **drafts_of(usage)},
                "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
                **times_of(usage),
            },
            **({} if self._raw is None else self._raw.fields()),
        }

    def item_id(self, block: Block) -> str:
        """The first item's id is as it would be alone."""
        number = f"_{block.index}" if block.index else ""
        return f"{_PREFIXES[block.kind]}_{self._request_id}{number}"

    def item(self, block: Block, status: str, *, is_begun: bool = False) -> dict[str, Any]:
        """An item of the output; with `is_begun`, before any of it."""
        item: dict[str, Any] = {"id": self.item_id(block), "status": status}
        text = "" if is_begun else block.text
        if block.kind == "call":
            call_id = f"call_{self._request_id[:24]}_{block.call_index}"
            return {"type": "function_call", **item, "call_id": call_id, "name": block.name, "arguments": text}
        content = [] if is_begun else [self.part(block)]
        if block.kind == "thinking":
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def part(self, block: Block, *, is_begun: bool = False) -> dict[str, Any]:
        """A part of an item's content, likewise."""
        text = "" if is_begun else block.text
        if block.kind == "thinking":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs(block.logprobs)}

    def logprobs(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return listed_logprobs(logprobs, self._names)


def _or_one(value: float | None) -> float:
    return 1.0 if value is None else value
