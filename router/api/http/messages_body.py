"""Body of `/v1/messages`: Anthropic's conversations, tools and thinking, as the same chat in OpenAI's words."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from holdfast.router.api.http.bodies import ONE_PLAIN_CHOICE, ChatBody, Notes
from holdfast.router.api.http.json_body import Listed, Reads
from holdfast.router.chat import PART_NOTES, CacheMark, content_text, no_text
from holdfast.router.tools.tools import check_tool_names
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.value_types import Neutral, check_names, is_whole

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


MAX_MARKS: Final = 4
"""Most marks of the prompt's cache, as Anthropic has it."""

TTLS: Final[Mapping[str, int]] = {"5m": 300, "1h": 3600}
"""Seconds that a mark asks for."""


_MARK: Final = ("type", "ttl", "scope")
"""Fields of a mark. `scope` is a wish about whom a vendor shares its cache with; a tenant here has its own."""

_BLOCKS: Final[Mapping[object, Collection[str]]] = {
    "text": ("text",),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input", "caller", "toolset_name"),
    "tool_result": ("tool_use_id", "content", "is_error", "toolset_name"),
}
"""Fields of blocks by their type, beside it and `PART_NOTES`. Callers and toolsets are vendors' notes."""


class MessagesBody(Reads, Notes):
    """`POST /v1/messages`."""

    neutral: ClassVar[Neutral] = {
        **Reads.neutral,
        **ONE_PLAIN_CHOICE,
        "mcp_servers": ([],),
        "container": (),
        "diagnostics": (),
        "inference_geo": ("global",),
        "speed": ("standard",),
        "thinking.display": ("summarized",),
    }

    objects: ClassVar[Mapping[str, Collection[str]]] = {
        **Reads.objects,
        "cache_control": _MARK,
        "thinking": ("type", "budget_tokens"),
        "output_config": ("format", "effort"),
        "output_config.format": ("type", "schema"),
        "output_format": ("type", "schema"),
        "tool_choice": ("type", "name", "disable_parallel_tool_use"),
    }

    passed_on: ClassVar[Container[str]] = frozenset(ChatBody.model_fields)

    renamed: ClassVar[Mapping[str, str]] = {
        "stop_sequences": "stop",
        "output_config.format": "response_format",
        "output_config.format.schema": "response_format.json_schema.schema",
        "output_config.effort": "reasoning_effort",
        "output_format": "response_format",
        "output_format.schema": "response_format.json_schema.schema",
    }

    fixed_names: ClassVar[Mapping[str, str]] = {
        "tools[].function": "tools[]",
        "tools[].function.parameters": "tools[].input_schema",
        "tool_choice.function": "tool_choice",
    }

    lists_of_objects = ("messages", "system", "tools")
    model: str | None = None
    messages: Annotated[Listed[dict[str, Any]], Field(min_length=1)]
    system: str | Listed[dict[str, Any]] | None = None
    max_tokens: Annotated[int, Field(ge=1)]
    """Asked for by Anthropic's protocol."""
    stop_sequences: Listed[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    """Mark that holds for the whole request."""
    user_profile_id: str | None = None
    workspace_id: str | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    """The shape of the output (`format`), and the effort."""
    output_format: dict[str, Any] | None = None
    """The older place of the shape."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, as vLLM's server takes them."""

    def _check_together(self) -> None:
        user = (self.metadata or {}).get("user_id")
        if not isinstance(user, str | None):
            raise InvalidRequestError("metadata.user_id", user, "must be text")
        if (number := len(marks_of(self)) + (_ttl_of(self, "") is not None)) > MAX_MARKS:
            raise InvalidRequestError("cache_control", f"{number} marks", f"must be at most {MAX_MARKS} marks")

    @property
    def shape_field(self) -> str:
        """Field of the output's structure."""
        return self.shape_field_or("output_format" if self.output_format is not None else "output_config.format")


class CountBody(MessagesBody):
    """`POST /v1/messages/count_tokens`: the same, without a length."""

    max_tokens: Annotated[int, Field(ge=1)] = 1


def chat_body(body: MessagesBody) -> ChatBody:
    """The same request in OpenAI's words. Raises `InvalidRequestError`, naming the field."""
    own: dict[str, Any] = {"messages": list(_messages(body)), "max_tokens": body.max_tokens, "model": body.model}
    own |= body.given_renamed()
    if (ttl_s := _ttl_of(body, "")) is not None:
        own["cache_ttl_s"] = ttl_s
    if body.tools:
        own["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        own["tool_choice"] = _choice(body.tool_choice)
        own["parallel_tool_calls"] = not _flag(body.tool_choice, "disable_parallel_tool_use", "tool_choice")
    if body.thinking is not None:
        thinks = _thinks(body.thinking)
        own["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
    if body.chat_template_kwargs is not None:
        own["chat_template_kwargs"] = {**body.chat_template_kwargs, **own.get("chat_template_kwargs", {})}
    own["response_format"] = _format(body)
    own["reasoning_effort"] = (body.output_config or {}).get("effort")
    if is_prefilled(body):
        own |= _prefilled(body, own)
    return ChatBody.made_of(body, {**(body.model_extra or {}), **own})


def marks_of(body: MessagesBody) -> tuple[CacheMark, ...]:
    """Marks of the prompt's cache by their places in the chat. One on a tool stands for all tools and the system
    prompt, where templates write them; one on thoughts or a call for all before the next message.

    Raises `InvalidRequestError`, naming the field.
    """
    marks: list[CacheMark] = []
    number = 0
    if body.system:
        marks += _marks_in(body.system, "system", number, ("text",))
        number += 1
    for index, tool in enumerate(body.tools or ()):
        if (ttl_s := _ttl_of(tool, f"tools[{index}].")) is not None:
            marks.append(CacheMark(number, 0, ttl_s))
    for index, message in enumerate(body.messages):
        content, field = message.get("content"), f"messages[{index}].content"
        blocks = content if isinstance(content, list) else ()
        if message.get("role") != "assistant":
            for at, block in enumerate(blocks):
                if isinstance(block, Mapping) and block.get("type") == "tool_result":
                    if (ttl_s := _ttl_of(block, f"{field}[{at}].")) is not None:
                        text = _result(block, f"{field}[{at}]")["content"]
                        marks.append(CacheMark(number, len(text), ttl_s))
                    number += 1
            number -= not _has_text(blocks) and len(blocks) > 0
        marks += _marks_in(content, field, number, ("text",))
        number += 1
    return tuple(marks)


def _has_text(blocks: Sequence[object]) -> bool:
    return any(not (isinstance(block, Mapping) and block.get("type") == "tool_result") for block in blocks)


def _marks_in(content: object, field: str, number: int, kinds: Container[str]) -> Iterator[CacheMark]:
    """Marks on the blocks of a message, whose text is that of its text blocks, but for results of calls."""
    num_chars = 0
    for index, block in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(block, Mapping) or block.get("type") == "tool_result":
            continue
        is_text = block.get("type") in kinds and isinstance(block.get("text"), str)
        num_chars += len(block["text"]) if is_text else 0
        if (ttl_s := _ttl_of(block, f"{field}[{index}].")) is not None:
            yield CacheMark(number, num_chars, ttl_s) if is_text else CacheMark(number + 1, 0, ttl_s)


def _ttl_of(block: MessagesBody | Mapping[str, Any], field: str) -> int | None:
    """Seconds that a block's mark asks for; None: it sets none. Raises `InvalidRequestError`, naming the field."""
    mark = block.get("cache_control") if isinstance(block, Mapping) else block.cache_control
    if mark is None:
        return None
    field += "cache_control"
    if not isinstance(mark, Mapping):
        raise InvalidRequestError(field, mark, "must be an object")
    if mark.get("type") != "ephemeral":
        raise InvalidRequestError(f"{field}.type", mark.get("type"), "must be ephemeral")
    check_names(mark, _MARK, field)
    ttl = mark.get("ttl") or "5m"
    if not isinstance(ttl, str) or ttl not in TTLS:
        raise InvalidRequestError(f"{field}.ttl", ttl, f"must be {' or '.join(TTLS)}")
    return TTLS[ttl]


def is_prefilled(body: MessagesBody) -> bool:
    """Whether the last message begins the answer."""
    return body.messages[-1].get("role") == "assistant"


def _prefilled(body: MessagesBody, own: Mapping[str, Any]) -> dict[str, Any]:
    """Fields for an answer that continues the last message, as the API defines it."""
    last = own["messages"][-1]
    field = f"messages[{len(body.messages) - 1}]"
    if last.get("tool_calls"):
        raise InvalidRequestError(field, "tool_use", "must not be the last message: it has calls without their results")
    if own["response_format"] is not None:
        limit = "must not be an assistant's where the output has a shape: the shape is that of a whole answer"
        raise InvalidRequestError(field, body.shape_field, limit)
    if not last.get("content"):
        return {"messages": own["messages"][:-1]} if len(own["messages"]) > 1 else {}
    return {"continue_final_message": True, "add_generation_prompt": False}


def _format(body: MessagesBody) -> dict[str, Any] | None:
    """The shape of the output in OpenAI's words."""
    asked = body.output_format if body.output_format is not None else (body.output_config or {}).get("format")
    if asked is None:
        return None
    field = body.shape_field
    if not isinstance(asked, Mapping) or asked.get("type") != "json_schema":
        kind = asked.get("type") if isinstance(asked, Mapping) else asked
        raise InvalidRequestError(f"{field}.type", kind, "must be json_schema")
    if not isinstance(asked.get("schema"), Mapping):
        raise InvalidRequestError(f"{field}.schema", asked.get("schema"), "must be a JSON schema")
    return {"type": "json_schema", "json_schema": {"schema": dict(asked["schema"])}}


def _thinks(thinking: Mapping[str, Any]) -> bool:
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidRequestError("thinking.type", kind, "must be enabled, adaptive or disabled")
    budget = thinking.get("budget_tokens")
    if budget is not None and (not is_whole(budget) or budget < 1):
        raise InvalidRequestError("thinking.budget_tokens", budget, "must be a whole number of at least 1")
    return bool(kind != "disabled")


def _tool(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequestError(f"{field}.type", tool["type"], "must be custom: this server runs no tools itself")
    check_tool_names(tool, ("type", "name", "description", "strict", "input_schema"), field)
    function = {name: tool.get(name) for name in ("name", "description", "strict")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


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
        yield {"role": "system", "content": content_text(body.system, "system")}
    for index, message in enumerate(body.messages):
        content, field = message.get("content"), f"messages[{index}].content"
        check_names(message, ("role", "content"), f"messages[{index}]")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequestError(f"messages[{index}].role", role, "must be user or assistant")
        if not isinstance(content, list):
            yield {"role": role, "content": _text(content, field, may_lack=role == "assistant")}
        elif role == "assistant":
            yield _said(content, field)
        else:
            yield from _asked(str(role), content, field)


def _text(content: object, field: str, *, may_lack: bool) -> str:
    """Text of a content that is no list of blocks."""
    if isinstance(content, str) or (content is None and may_lack):
        return content or ""
    raise InvalidRequestError(field, content, "must be text, or a list of blocks")


def _said(content: Sequence[object], field: str) -> Mapping[str, Any]:
    """A turn of the model: thinking, text and tool calls."""
    text = ""
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        kind = _kind_of(block, f"{field}[{index}]")
        if isinstance(block, Mapping) and kind == "tool_use":
            calls.append(_call(block, f"{field}[{index}]"))
        elif isinstance(block, Mapping) and kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            text += _block_text(block, f"{field}[{index}]")
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _kind_of(block: object, field: str) -> object:
    """Type of a block, whose fields are all known. Raises `InvalidRequestError`."""
    if not isinstance(block, Mapping):
        return None
    kind = block.get("type")
    if isinstance(kind, str) and kind in _BLOCKS:
        check_names(block, ("type", *_BLOCKS[kind]), field, PART_NOTES)
    return kind


def _call(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str):
        raise InvalidRequestError(f"{field}.name", name, "must be text")
    if not isinstance(arguments, Mapping | None):
        raise InvalidRequestError(f"{field}.input", arguments, "must be an object")
    return {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def _asked(role: str, content: Sequence[object], field: str) -> Iterator[Mapping[str, Any]]:
    """A turn of the user: tool results and text."""
    texts: list[str] = []
    for index, block in enumerate(content):
        if isinstance(block, Mapping) and _kind_of(block, f"{field}[{index}]") == "tool_result":
            yield _result(block, f"{field}[{index}]")
        else:
            texts.append(_block_text(block, f"{field}[{index}]"))
    if texts or not content:
        yield {"role": role, "content": "".join(texts)}


def _result(block: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """A result that is an error and says nothing says that."""
    result, call_id = block.get("content"), block.get("tool_use_id")
    is_error = _flag(block, "is_error", field)
    if not isinstance(call_id, str):
        raise InvalidRequestError(f"{field}.tool_use_id", call_id, "must be text")
    if isinstance(result, list):
        text = "".join(_block_text(one, f"{field}.content[{index}]") for index, one in enumerate(result))
    else:
        text = content_text(result, f"{field}.content")
    if not text and is_error:
        text = "error"
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _flag(given: Mapping[str, Any], name: str, field: str) -> bool:
    value = given.get(name)
    if not isinstance(value, bool | None):
        raise InvalidRequestError(f"{field}.{name}", value, "must be true or false")
    return bool(value)


def _block_text(block: object, field: str) -> str:
    """Text of a text block. Raises `InvalidRequestError`, naming the type, for any other block, such as an image."""
    kind = _kind_of(block, field) if isinstance(block, Mapping) else block
    text = block.get("text") if isinstance(block, Mapping) else None
    if kind != "text":
        raise no_text(f"{field}.type", kind)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{field}.text", text, "must be text")
    return text
