"""Chat request as plain data: messages, variables of the chat template, and the checks that need no template.

What may not live here: the form of messages (`chat_messages.py`), rendering (`router/text/chat.py`), tokens, wire
formats.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from holdfast.router.config import LimitsConfig
from holdfast.worker.errors import InvalidRequestError

Message: TypeAlias = Mapping[str, Any]
"""One turn of a chat: `role` and `content`, and in OpenAI's shape `tool_calls`, `tool_call_id`, `name`, `reasoning`."""

_ROLE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""The allowed roles. Templates insert the role between control tokens, so it must not inject any."""

_MAY_BE_EMPTY: Final = ("assistant", "tool", "function")
"""Roles whose content may be null: of a turn with calls alone, or of a call that returned nothing."""

MAX_NOW_S: Final = 253_402_300_799
"""The end of the year 9999, the last that `datetime` supports."""


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
    """Answers tell thoughts apart, where the template knows them. With tools they do so anyway."""
    continue_final_message: bool = False
    """The output goes on with the last message's content, whose turn stays open."""
    template: str = ""
    """The name of one of the model's chat templates; empty: `tool_use` with tools, and else `default`."""

    def check(self, limits: LimitsConfig) -> None:
        """Raises `InvalidRequestError`, naming field and limit."""
        check_messages(self.messages)
        if self.now_s is not None and not 0 <= self.now_s <= MAX_NOW_S:
            raise InvalidRequestError("chat.now_s", self.now_s, f"must be in [0, {MAX_NOW_S}]")
        if self.num_bytes > limits.max_prompt_bytes:
            limit = f"must have at most {limits.max_prompt_bytes} bytes (limits.max_prompt_bytes), not {self.num_bytes}"
            raise InvalidRequestError("chat.messages", f"{len(self.messages)} messages", limit)

        if self.continue_final_message and self.template_kwargs.get("add_generation_prompt"):
            limit = "must not be set with add_generation_prompt: a new message would begin"
            raise InvalidRequestError("chat.continue_final_message", True, limit)

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
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequestError(f"{name}.role", role, "must be a name like user or assistant")
    if not isinstance(content, str | list) and not (content is None and role in _MAY_BE_EMPTY):
        raise InvalidRequestError(f"{name}.content", content, "must be text")


def _num_bytes(part: object) -> int:
    return len((part if isinstance(part, str) else repr(part)).encode(errors="surrogatepass"))
