"""Endpoint `/v1/messages`: a chat in Anthropic's shape, answered whole or as its stream of events; and token counts."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from holdfast.router.api.http.chat_completions import chat_request
from holdfast.router.api.http.choices import Block, BlockEvent, Blocks, drafts_of, times_of
from holdfast.router.api.http.messages_body import TTLS, MessagesBody, chat_body, marks_of
from holdfast.router.generation import Generation, OutputDelta, Usage
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.tools.chat_style import ChatReader
from holdfast.worker.request import FinishReason, KeptPrefix

_STOP_REASONS: Final = {FinishReason.LENGTH: "max_tokens"}


def message_request(body: MessagesBody, tenant: str = "") -> GenerationRequest:
    """The request that a body makes. Raises `InvalidRequestError`, naming the field."""
    request, marks = chat_request(chat_body(body), tenant), marks_of(body)
    if not marks or request.chat is None:
        return request
    return replace(request, chat=replace(request.chat, marks=marks))


def whole_message(completed: Generation, reader: ChatReader | None, kept: Sequence[KeptPrefix] = ()) -> dict[str, Any]:
    """The whole response. `kept`: prefixes of the prompt that are kept, the shortest first."""
    first, blocks = completed.completions[0], Blocks(reader)
    for _ in blocks.push(first):
        pass
    return {
        **_message(completed.request_id, completed.model),
        "content": [_whole_block(completed.request_id, block) for block in blocks.blocks],
        **_stop(first.finish_reason, first.stop_reason, blocks.num_calls),
        "usage": _usage(completed.usage, kept),
    }


class MessageEvents:
    """Writes the events of one stream: its blocks, between the message's beginning and its end."""

    def __init__(self, answer: SampledAnswer, reader: ChatReader | None) -> None:
        self.num_events = 0
        self._answer = answer
        self._blocks = Blocks(reader)
        self._has_begun = False
        self._num_tokens = self._num_cached_tokens = 0

    def of(self, delta: OutputDelta) -> bytes:
        events = b"" if self._has_begun else self._beginning(delta)
        self._num_tokens += len(delta.token_ids)
        events += b"".join(map(self._block_event, self._blocks.push(delta)))
        if delta.finish_reason is not None:
            ended = _stop(delta.finish_reason, delta.stop_reason, self._blocks.num_calls)
            events += _event("message_delta", {"delta": ended, "usage": self._usage(self._num_tokens, delta.usage)})
        return events

    def plain(self, delta: OutputDelta) -> None:
        return None

    def holds(self, choice: int) -> bool:
        """False: this API sends no single tokens."""
        return False

    async def end(self) -> bytes:
        return _event("message_stop", {})

    def _beginning(self, delta: OutputDelta) -> bytes:
        self._has_begun = True
        head = _message(self._answer.request.request_id, self._answer.model)
        self._num_cached_tokens = delta.num_cached_tokens
        return _event("message_start", {"message": {**head, "content": [], "usage": self._usage(0)}})

    def _usage(self, num_completion_tokens: int, ended: Usage | None = None) -> dict[str, Any]:
        """Usage so far; `ended`: that of the request, once it has ended."""
        request = self._answer.request
        usage = Usage(
            num_prompt_tokens=len(request.prompt_token_ids),
            num_completion_tokens=num_completion_tokens,
            num_cached_tokens=self._num_cached_tokens,
            figures=None if ended is None else ended.figures,
        )
        return _usage(usage, request.kept_prefixes)

    def _block_event(self, event: BlockEvent) -> bytes:
        block, at = event.block, {"index": event.block.index}
        if event.what == "begin":
            begun = _begun_block(self._answer.request.request_id, block)
            return _event("content_block_start", {**at, "content_block": begun})
        if event.what == "more":
            return _event("content_block_delta", {**at, "delta": _delta(block, event.piece)})
        ended = _event("content_block_stop", at)
        if block.kind != "thinking":
            return ended
        return _event("content_block_delta", {**at, "delta": {"type": "signature_delta", "signature": ""}}) + ended


def _begun_block(request_id: str, block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": _call_id(request_id, block), "name": block.name, "input": {}}


def _delta(block: Block, piece: str) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text_delta", "text": piece}
    if block.kind == "thinking":
        return {"type": "thinking_delta", "thinking": piece}
    return {"type": "input_json_delta", "partial_json": piece}


def _whole_block(request_id: str, block: Block) -> dict[str, Any]:
    begun = _begun_block(request_id, block)
    if block.kind == "call":
        return {**begun, "input": _arguments(block.text)}
    return {**begun, block.kind: block.text}


def _arguments(text: str) -> dict[str, Any]:
    """Arguments of a call; empty if it was cut off, or is nested deeper than JSON is read here."""
    try:
        arguments = json.loads(text, parse_float=_finite)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _finite(number: str) -> float | str:
    """A number beyond a float's range stays text: written as a number it would be `Infinity`, which no JSON has."""
    value = float(number)
    return value if math.isfinite(value) else number


def _call_id(request_id: str, block: Block) -> str:
    return f"toolu_{request_id[:24]}_{block.call_index}"


def _message(request_id: str, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{request_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stop(reason: FinishReason | None, ended_by: str | int | None, num_calls: int) -> dict[str, str | None]:
    """The stop reason of a message: `tool_use` with calls; for a stop token, for which this API has no name, the end
    of the turn.
    """
    if reason is FinishReason.STOP and num_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(ended_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": ended_by}
    return {"stop_reason": _STOP_REASONS.get(reason or FinishReason.STOP, "end_turn"), "stop_sequence": None}


def _usage(usage: Usage, kept: Sequence[KeptPrefix]) -> dict[str, Any]:
    """Usage of a prompt whose prefixes are kept: tokens that were not read from the cache were written to it, up to the
    last prefix, each for the longest time of its prefixes.
    """
    written = {"short": 0, "long": 0}
    before = usage.num_cached_tokens
    for index, (num_tokens, _) in enumerate(kept):
        longest = max(ttl_s for _, ttl_s in kept[index:])
        written["short" if longest <= TTLS["5m"] else "long"] += max(0, num_tokens - before)
        before = max(before, num_tokens)
    num_short, num_written = written["short"], written["short"] + written["long"]
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens - num_written,
        "output_tokens": usage.num_completion_tokens,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "cache_creation_input_tokens": num_written,
        "cache_creation": {
            "ephemeral_5m_input_tokens": num_short,
            "ephemeral_1h_input_tokens": num_written - num_short,
        },
        **_figures(usage),
    }


def _figures(usage: Usage) -> dict[str, Any]:
    """Tokens read by where they came from, and guessed ones, in the way of `cache_creation`; and times."""
    if (figures := usage.figures) is None:
        return {}
    on_disk = figures.num_disk_tokens
    read = {"memory_input_tokens": usage.num_cached_tokens - on_disk, "disk_input_tokens": on_disk}
    return {"cache_read": read, **drafts_of(usage), **times_of(usage)}


def _event(kind: str, fields: Mapping[str, Any]) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False).encode(errors="replace")
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
