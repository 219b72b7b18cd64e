"""Protobuf codec of chats: turns, tools, and answers, as messages and as plain data.

On the wire tools and calls have separate fields; as plain data they have OpenAI's shape, which chat templates read.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast.router.chat import Chat, Message, plain_message
from holdfast.router.generation import ChatOutput, ToolCall
from holdfast.router.wire.json_bounds import check_inner
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.value_types import check_names

_MODES: Final = {
    "auto": inference_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": inference_pb2.TOOL_CHOICE_MODE_NONE,
    "required": inference_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
_MODES_READ: Final = {int(number): mode for mode, number in _MODES.items()} | {
    int(inference_pb2.TOOL_CHOICE_MODE_UNSPECIFIED): "auto"
}

_TURN_FIELDS: Final = {
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "name",
    "reasoning",
    "reasoning_content",
    "thinking",
}


def json_object(field: str, text: str) -> dict[str, Any]:
    """Object of JSON text; empty text is an empty object. Raises `InvalidRequestError`."""
    check_inner(field, text)
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidRequestError(field, text, "must be the text of a JSON object")
    return values


# --- turns ---


def turn(message: inference_pb2.ChatMessage) -> Message:
    """The message in OpenAI's shape, without unset fields."""
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        made["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.reasoning:
        made["reasoning"] = message.reasoning
    return made | {name: getattr(message, name) for name in ("tool_call_id", "name") if getattr(message, name)}


def _call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def turn_message(field: str, turn: Message) -> inference_pb2.ChatMessage:
    """Raises `InvalidRequestError`, naming the field."""
    plain = plain_message(turn, field)
    if unknown := sorted(plain.keys() - _TURN_FIELDS):
        raise InvalidRequestError(field, unknown, f"must have these fields alone: {', '.join(sorted(_TURN_FIELDS))}")
    calls = plain.get("tool_calls", ())
    return inference_pb2.ChatMessage(
        role=plain["role"],
        tool_calls=[_call_message(f"{field}.tool_calls[{index}]", call) for index, call in enumerate(calls)],
        **{name: plain.get(name, "") for name in ("content", "tool_call_id", "name", "reasoning")},
    )


def _call_message(field: str, call: Mapping[str, Any]) -> inference_pb2.ToolCall:
    return inference_pb2.ToolCall(
        id=_text(f"{field}.id", call.get("id", "")),
        name=call["function"]["name"],
        arguments=_json_text(f"{field}.function.arguments", call["function"]["arguments"]),
    )


# --- tools ---


def tool_fields(message: inference_pb2.Chat) -> dict[str, Any]:
    """The fields of `Chat` that are about tools and thoughts."""
    is_parallel = message.parallel_tool_calls if message.HasField("parallel_tool_calls") else True
    return {
        "tools": tuple(_tool(f"chat.tools[{index}]", tool) for index, tool in enumerate(message.tools)),
        "tool_choice": _tool_choice(message.tool_choice) if message.HasField("tool_choice") else None,
        "parallel_tool_calls": is_parallel,
        "split_reasoning": message.split_reasoning,
    }


def _tool(field: str, message: inference_pb2.Tool) -> dict[str, Any]:
    parameters = json_object(f"{field}.parameters", message.parameters)
    function = {"name": message.name, "description": message.description, "parameters": parameters}
    return {"type": "function", "function": function | {"strict": message.strict}}


def _tool_choice(message: inference_pb2.ToolChoice) -> str | dict[str, Any]:
    if message.WhichOneof("choice") == "name":
        return {"type": "function", "function": {"name": message.name}}
    if message.mode not in _MODES_READ:
        raise InvalidRequestError("chat.tool_choice.mode", message.mode, "must be a value of ToolChoiceMode")
    return _MODES_READ[message.mode]


def set_tools(message: inference_pb2.Chat, chat: Chat) -> None:
    """Raises `InvalidRequestError` for data that does not fit the message."""
    for index, tool in enumerate(chat.tools):
        message.tools.append(_tool_message(f"chat.tools[{index}]", tool))
    if chat.tool_choice is not None:
        message.tool_choice.CopyFrom(_tool_choice_message(chat.tool_choice))
    if not chat.parallel_tool_calls:
        message.parallel_tool_calls = False
    message.split_reasoning = chat.split_reasoning


def _tool_message(field: str, tool: object) -> inference_pb2.Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(field, tool, "must be an object with a function")
    check_names(function, ("name", "description", "parameters", "strict"), f"{field}.function")
    return inference_pb2.Tool(
        name=_text(f"{field}.function.name", function.get("name")),
        description=_text(f"{field}.function.description", function.get("description") or ""),
        parameters=_json_text(f"{field}.function.parameters", function.get("parameters") or {}),
        strict=bool(function.get("strict")),
    )


def _tool_choice_message(choice: str | Mapping[str, Any]) -> inference_pb2.ToolChoice:
    if isinstance(choice, str):
        if choice not in _MODES:
            raise InvalidRequestError("chat.tool_choice", choice, f"must be {', '.join(_MODES)}, or name a function")
        return inference_pb2.ToolChoice(mode=_MODES[choice])
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return inference_pb2.ToolChoice(name=_text("chat.tool_choice.function.name", name))


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(field, value, "must be text")
    return value


def _json_text(field: str, value: object) -> str:
    """JSON text of an object, or the text itself; empty for an empty one."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value) if value else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(field, value, f"must be what JSON can say: {error}") from None


# --- answers ---


def chat_output(message: inference_pb2.ChatOutput | inference_pb2.ChatDelta) -> ChatOutput:
    """Chat output of a message."""
    given: Sequence[inference_pb2.ToolCall | inference_pb2.ToolCallDelta] = message.tool_calls
    calls: list[ToolCall] = []
    for number, call in enumerate(given):
        index = call.index if isinstance(call, inference_pb2.ToolCallDelta) else number
        calls.append(ToolCall(index=index, id=call.id, name=call.name, arguments=call.arguments))
    return ChatOutput(reasoning=message.reasoning, content=message.content, tool_calls=tuple(calls))


def chat_delta_message(new: ChatOutput) -> inference_pb2.ChatDelta:
    """Message of new chat output."""
    calls = [
        inference_pb2.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
        for call in new.tool_calls
    ]
    return inference_pb2.ChatDelta(reasoning=new.reasoning, content=new.content, tool_calls=calls)


def chat_output_message(output: ChatOutput) -> inference_pb2.ChatOutput:
    """Protobuf message of `ChatOutput`."""
    calls = [inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in output.tool_calls]
    return inference_pb2.ChatOutput(reasoning=output.reasoning, content=output.content, tool_calls=calls)
