"""Chat request as plain data: messages, variables of the chat template, and the checks that need no template."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.router.config import LimitsConfig
from holdfast.worker.errors import InvalidRequestError, shortened
from holdfast.worker.value_types import check_names, is_whole

Message: TypeAlias = Mapping[str, Any]
"""One turn of a chat: `role` and `content`, and in OpenAI's shape `tool_calls`, `tool_call_id`, `name`, `reasoning`."""

_ROLE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""The allowed roles. Templates insert the role between control tokens, so it must not inject any."""

_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")

_MAY_BE_EMPTY: Final = ("assistant", "tool", "function")
"""Roles whose content may be null: of a turn with calls alone, or of a call that returned nothing."""

MAX_NOW_S: Final = 253_402_300_799
"""The end of the year 9999, the last that `datetime` supports."""


class CacheMark(NamedTuple):
    """Place in a chat up to which its prompt stays cached: after this number of characters of a message's content. A
    place behind the last message stands for the whole prompt.
    """

    message: int
    num_chars: int
    ttl_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation that the model continues."""

    messages: Sequence[Message] = field(hash=False)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further variables of the template. `add_generation_prompt` is true unless it is here."""
    now_s: int | None = None
    """The current time for templates that use the date, in seconds since 1970, UTC; None: the router's clock."""
    tools: Sequence[Mapping[str, Any]] = field(default=(), hash=False)
    """Functions that the model may call, in OpenAI's shape."""
    tool_choice: str | Mapping[str, Any] | None = field(default=None, hash=False)
    """`none`, `auto`, `required`, or an object that names a function; None: `auto`."""
    parallel_tool_calls: bool = True
    """One answer may have several calls."""
    split_reasoning: bool = False
    """Answers separate reasoning from content, if the template has reasoning. With tools they always do."""
    continue_final_message: bool = False
    """The output continues the last message's content, whose turn stays open."""
    template: str = ""
    """The name of one of the model's chat templates; empty: `tool_use` with tools, and else `default`."""
    marks: tuple[CacheMark, ...] = ()
    """Places up to which the prompt is to stay cached."""

    def check(self, limits: LimitsConfig) -> None:
        """Raises `InvalidRequestError`, naming field and limit."""
        check_messages(self.messages)
        self.check_now()
        if self.num_bytes > limits.max_prompt_bytes:
            limit = f"must have at most {limits.max_prompt_bytes} bytes (limits.max_prompt_bytes), not {self.num_bytes}"
            raise InvalidRequestError("chat.messages", f"{len(self.messages)} messages", limit)

        if self.continue_final_message and self.template_kwargs.get("add_generation_prompt"):
            limit = "must not be set with add_generation_prompt: a new message would begin"
            raise InvalidRequestError("chat.continue_final_message", True, limit)

    def check_now(self) -> None:
        """Raises `InvalidRequestError` for a time that no template can write."""
        if self.now_s is not None and not (is_whole(self.now_s) and 0 <= self.now_s <= MAX_NOW_S):
            raise InvalidRequestError("chat.now_s", self.now_s, f"must be a whole number in [0, {MAX_NOW_S}]")

    def is_short(self, most_parts: int, most_bytes: int) -> bool:
        """Whether it has at most this number of values, at any depth, and bytes of text in all. Stops at the limit."""
        left: list[Any] = [self.template_kwargs, *self.tools[:most_parts], *self.messages[:most_parts]]
        num_parts, num_bytes = len(self.tools) + len(self.messages), 0
        while left and num_parts <= most_parts and num_bytes <= most_bytes:
            part = left.pop()
            if isinstance(part, str):
                num_bytes += len(part) if part.isascii() else 4 * len(part)
            elif isinstance(part, Mapping | list | tuple):
                num_parts += len(part)
                if num_parts <= most_parts:
                    left.extend([*part, *part.values()] if isinstance(part, Mapping) else part)
        return num_parts <= most_parts and num_bytes <= most_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all texts of the messages in UTF-8, and of the `repr` of all else in them and in the variables."""
        parts = [part for message in self.messages for part in message.values()]
        return sum(map(_num_bytes, (*parts, *self.template_kwargs.items(), *self.tools)))


def check_messages(messages: Sequence[Message]) -> None:
    """Raises `InvalidRequestError` unless it is a list of valid messages."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequestError("chat.messages", messages, "must be a list of messages")
    if not messages:
        raise InvalidRequestError("chat.messages", messages, "must have at least one message")
    for index, message in enumerate(messages):
        _check_message(f"chat.messages[{index}]", message)


def _check_message(name: str, message: Message) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(name, message, "must be an object with role and content")
    role, content = checked_role(message.get("role"), f"{name}.role"), message.get("content")
    if not isinstance(content, str | list) and not (content is None and role in _MAY_BE_EMPTY):
        raise InvalidRequestError(f"{name}.content", content, "must be text")


def checked_role(role: object, field: str) -> str:
    """Any name: which ones there are is the template's to say. Raises `InvalidRequestError`, naming the field."""
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequestError(field, role, "must be a name like user or assistant")
    return role


def _num_bytes(part: object) -> int:
    return len((part if isinstance(part, str) else repr(part)).encode(errors="surrogatepass"))


_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the field that has it."""

PART_NOTES: Final = frozenset(
    ("annotations", "cache_control", "citations", "id", "index", "logprobs", "prompt_cache_breakpoint")
)
"""Fields of content parts that no answer depends on: notes of earlier answers, which clients send back, and marks of
the prompt's cache.
"""

REASONING: Final = ("reasoning", "reasoning_content", "thinking")
"""Names under which clients send an earlier turn's reasoning, and templates read it."""


def plain_messages(messages: Sequence[Mapping[str, Any]], field: str = "chat.messages") -> list[dict[str, Any]]:
    """The messages with content as one text, without fields that are null. Idempotent.

    Raises `InvalidRequestError`, naming the field, for content that is neither text nor a function call.
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


def no_text(field: str, kind: object) -> InvalidRequestError:
    """An error for a part of a prompt that is no text, such as an image; `kind` is what its type says."""
    return InvalidRequestError(field, kind, f"must be text, not {shortened(kind)}: models here read text alone")


def _part_text(part: object, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else part
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise no_text(f"{field}.type", kind)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(f"{field}.{_TEXT_PARTS[kind]}", text, "must be text")
    check_names(part, ("type", _TEXT_PARTS[kind]), field, PART_NOTES)
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
    """The object that arguments are, also as JSON text; None for text that is not an object, such as that of a cut
    call, and for text that escapes half a surrogate pair, which no prompt can contain.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments)
        if _SURROGATE.search(arguments):
            json.dumps(read, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return {} if read is None else read if isinstance(read, dict) else None
