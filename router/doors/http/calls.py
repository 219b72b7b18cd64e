"""Calls and reasoning of OpenAI-style chats: what a reader finds in an output, as messages and deltas have it.

What may not live here: reading them (`router/tools/`), chunks (`chat_completions.py`).
"""

from collections.abc import Iterable
from typing import Any

from holdfast.router.doors.http.choices import finish_of
from holdfast.router.tools.call_events import CallArguments, CallBegin, CallEvent, Content
from holdfast.router.tools.chat_style import ChatReader, Reasoning
from holdfast.worker.request import FinishReason


def finish_after_calls(reason: FinishReason | None, reader: ChatReader | None) -> str | None:
    """The finish reason, which is `tool_calls` for an output that ended by itself and has calls."""
    if reason is FinishReason.STOP and reader is not None and reader.num_calls:
        return "tool_calls"
    return finish_of(reason)


def delta_of(prefix: str, event: Reasoning | CallEvent) -> dict[str, Any]:
    """What a chunk says of an event; empty for the end of a call, of which nothing is said."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning": event.text, "reasoning_content": event.text}
    if isinstance(event, CallBegin):
        return {"tool_calls": [_call(prefix, event.index, event.name, "")]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.json}}]}
    return {}


def whole_message(prefix: str, events: Iterable[Reasoning | CallEvent]) -> dict[str, Any]:
    """The fields of a message that an output's events fill."""
    content, reasoning, calls = "", "", list[dict[str, Any]]()
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallBegin):
            calls.append(_call(prefix, event.index, event.name, ""))
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.json
    message: dict[str, Any] = {"content": content or (None if calls else "")}
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return message


def _call(prefix: str, index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"{prefix}_{index}", "type": "function", "function": function}
