"""Messages of a chat in one form, whichever API they came by: OpenAI's shape, with each content as one text.

What may not live here: what a model's chat template takes of them (`router/text/adapted_messages.py`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast.worker.errors import InvalidRequestError

_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the field that has it."""

REASONING: Final = ("reasoning", "reasoning_content", "thinking")
"""Names under which clients send an earlier turn's reasoning, and templates read it."""


def plain_messages(messages: Sequence[Mapping[str, Any]], field: str = "chat.messages") -> list[dict[str, Any]]:
    """The messages with content as one text, without fields that are null. Idempotent.

    Raises `InvalidRequestError`, naming the field, for what is no text and no call of a function.
    """
    return [plain_message(message, f"{field}[{index}]") for index, message in enumerate(messages)]


def plain_message(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    """One of them."""
    made = {name: value for name, value in message.items() if value is not None or name == "content"}
    refusal = made.pop("refusal", "")
    made["content"] = content_text(made.get("content"), f"{field}.content") + content_text(refusal, f"{field}.refusal")
    for name in ("name", "tool_call_id"):
        if not isinstance(made.get(name, ""), str):
            raise InvalidRequestError(f"{field}.{name}", made[name], "must be text")
    if (legacy := made.pop("function_call", None)) is not None:
        made.setdefault("tool_calls", [{"type": "function", "function": legacy}])
    if calls := _calls(made.pop("tool_calls", ()), f"{field}.tool_calls"):
        made["tool_calls"] = calls
    if reasoning := next((made[name] for name in REASONING if made.get(name)), ""):
        made |= dict.fromkeys(REASONING, content_text(reasoning, f"{field}.reasoning"))
    return made


def content_text(content: object, field: str) -> str:
    """Content as one text: of a text, a list of text parts, or null. Raises `InvalidRequestError` for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(field, content, "must be text")
    return "".join(_part_text(part, f"{field}[{index}]") for index, part in enumerate(content))


def _part_text(part: object, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else part
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise InvalidRequestError(f"{field}.type", kind, "must be text: this model takes no other kind of input")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(f"{field}.{_TEXT_PARTS[kind]}", text, "must be text")
    return text


def _calls(calls: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(field, calls, "must be a list of calls")
    return [_call(call, f"{field}[{index}]") for index, call in enumerate(calls)]


def _call(call: object, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequestError(field, call, "must be an object with a function")
    if call.get("type") not in (None, "function"):
        raise InvalidRequestError(f"{field}.type", call["type"], "must be function")
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{field}.function.name", function.get("name"), "must be text")
    arguments = call_arguments(function.get("arguments"), f"{field}.function.arguments")
    made = {name: value for name, value in call.items() if value is not None}
    return {**made, "type": "function", "function": {**function, "arguments": arguments}}


def call_arguments(arguments: object, field: str) -> Mapping[str, Any] | str:
    """A call's arguments: an object, or text, which should be JSON."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str | Mapping):
        raise InvalidRequestError(field, arguments, "must be JSON text or an object")
    return arguments


def arguments_object(arguments: Mapping[str, Any] | str) -> Mapping[str, Any] | None:
    """The object that arguments are, also as JSON text; None of text that is none, such as that of a cut call."""
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return {} if read is None else read if isinstance(read, dict) else None
