"""Body of `/v1/messages`: Anthropic's conversations, tools and thinking, as the same chat in OpenAI's words.

What may not live here: answers (`messages.py`), checks of what is the same in both (`router/doors/chat_answer.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from holdfast.router.chat import flat_message
from holdfast.router.doors.http.bodies import ONE_PLAIN_CHOICE, ChatBody, Listed, Reads
from holdfast.router.tools.tools import checked_tool
from holdfast.worker.errors import InvalidRequestError

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class MessagesBody(Reads):
    """`POST /v1/messages`."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **Reads.neutral,
        **ONE_PLAIN_CHOICE,
        "mcp_servers": ([],),
        "container": (),
    }

    model: str | None = None
    messages: Annotated[Listed[dict[str, Any]], Field(min_length=1)]
    system: str | Listed[dict[str, Any]] | None = None
    max_tokens: Annotated[int, Field(ge=1)]
    """Asked for by Anthropic's protocol."""
    stop_sequences: Listed[str] | None = None
    stream: bool | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class CountBody(MessagesBody):
    """`POST /v1/messages/count_tokens`: the same, without a length."""

    max_tokens: Annotated[int, Field(ge=1)] = 1


def chat_body(body: MessagesBody) -> ChatBody:
    """The same request in OpenAI's words. Raises `InvalidRequestError`, naming the field."""
    own: dict[str, Any] = {"messages": list(_messages(body)), "max_tokens": body.max_tokens, "model": body.model}
    if body.stop_sequences:
        own["stop"] = body.stop_sequences
    if body.tools:
        own["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        own["tool_choice"] = _choice(body.tool_choice)
        own["parallel_tool_calls"] = body.tool_choice.get("disable_parallel_tool_use") is not True
    if body.thinking is not None:
        thinks = _thinks(body.thinking)
        own["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
    return ChatBody.made({**(body.model_extra or {}), **own})


def _thinks(thinking: Mapping[str, Any]) -> bool:
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidRequestError("thinking.type", kind, "must be enabled, adaptive or disabled")
    return bool(kind != "disabled")


def _tool(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequestError(f"{field}.type", tool["type"], "must be custom: this server has no tools of its own")
    name, schema, description = tool.get("name"), tool.get("input_schema"), tool.get("description")
    checked_tool(field, name, schema, description, tool.get("strict"))
    function = {"name": name, "description": description, "parameters": schema, "strict": tool.get("strict")}
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> object:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise InvalidRequestError("tool_choice.type", kind, "must be auto, any, tool or none")
    return _CHOICES[kind]


def _messages(body: MessagesBody) -> Iterator[Mapping[str, Any]]:
    """The conversation, with the system prompt as its first message."""
    if body.system:
        yield flat_message({"role": "system", "content": body.system})
    for index, message in enumerate(body.messages):
        content, field = message.get("content"), f"messages[{index}].content"
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequestError(f"messages[{index}].role", role, "must be user or assistant")
        if not isinstance(content, list):
            yield {"role": role, "content": content}
        elif role == "assistant":
            yield _said(content, field)
        else:
            yield from _asked(str(role), content, field)


def _said(content: Sequence[object], field: str) -> Mapping[str, Any]:
    """A turn of the model: what it thought, said and called."""
    texts: list[object] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(block, Mapping) and kind == "tool_use":
            arguments = block.get("input", {})
            if not isinstance(arguments, Mapping):
                raise InvalidRequestError(f"{field}[{index}].input", arguments, "must be an object")
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif isinstance(block, Mapping) and kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(block)
    message = dict(flat_message({"role": "assistant", "content": texts}))
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _asked(role: str, content: Sequence[object], field: str) -> Iterator[Mapping[str, Any]]:
    """A turn of the user: results of calls, and what they say besides."""
    texts: list[object] = []
    for index, block in enumerate(content):
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            result = block.get("content", "")
            if not isinstance(result, str | list):
                raise InvalidRequestError(f"{field}[{index}].content", result, "must be text or a list of blocks")
            told = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            yield flat_message(told)
        else:
            texts.append(block)
    if texts or not content:
        yield flat_message({"role": role, "content": texts})
