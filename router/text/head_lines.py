"""Head lines: rules for lines of a system prompt that change with each call, and spoil the prefix of all behind them.

A rule either drops a line that carries no meaning, or moves it to the end of the last message, where it spoils
nothing. Which rules hold is a setting (`router.head_line_rules`); lines that would match others are noted, so that
operators hear of clients that waste their cache.
"""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final, NamedTuple

from holdfast.router.chat import Chat

_HEAD: Final = 16_384
"""Characters of the system prompt that are looked at."""


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    is_dropped: bool
    """Whether the line carries no meaning for the model; others are moved."""


_LINE: Final = re.MULTILINE | re.IGNORECASE
_RULES: Final[dict[str, _Rule]] = {
    # As Claude Code sends it: a separate block, without a line break before the next one.
    "billing": _Rule(re.compile(r"\Ax-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\n]*;)+[ \t]*\n?", re.I), True),
    "date": _Rule(
        re.compile(
            r"^[ \t]*(?:the )?(?:today(?:'s date)?|current date|date)(?: is)?:?[ \t]+(?!and time)[^\n]*?"
            r"(?:\d{4}-\d\d-\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b"
            r"[^\n]*\d{4})[^\n]*\n?",
            _LINE,
        ),
        False,
    ),
    "time": _Rule(
        re.compile(
            r"^[ \t]*(?:the )?(?:current )?(?:date and )?time(?: is)?:?[ \t]+[^\n]*\d:\d\d[^\n]*\n?",
            _LINE,
        ),
        False,
    ),
    "id": _Rule(
        re.compile(r"^[ \t]*(?:request|session|conversation|trace|message)[ _-]id:?[ \t]+[^\s]+[ \t]*(?:\n|\Z)", _LINE),
        False,
    ),
}


class HeadLine(NamedTuple):
    """A line that a rule which does not hold would have moved."""

    rule: str
    line: str


def tidied(chat: Chat, rules: Collection[str]) -> tuple[Chat, tuple[HeadLine, ...]]:
    """The chat after the rules that hold, and the lines that others found. Idempotent: a chat after the rules has no
    such line. A chat without a system prompt is left as it is.
    """
    first = chat.messages[0] if chat.messages else {}
    content = first.get("content")
    if first.get("role") not in ("system", "developer") or not isinstance(content, str):
        return chat, ()
    noted: list[HeadLine] = []
    moved: list[str] = []
    for name, rule in _RULES.items():
        if (found := rule.pattern.search(content, 0, _HEAD)) is None:
            continue
        if name not in rules:
            noted.append(HeadLine(name, found[0].strip()))
            continue
        content = content[: found.start()] + content[found.end() :]
        chat = replace(chat, marks=_shifted(chat, found.start(), found.end()))
        if not rule.is_dropped:
            moved.append(found[0].strip())
    if content == first["content"]:
        return chat, tuple(noted)
    messages: list[Any] = [{**first, "content": content}, *chat.messages[1:]]
    if moved:
        _append(messages, "\n".join(moved))
    return replace(chat, messages=messages), tuple(noted)


def _append(messages: list[Any], text: str) -> None:
    """Appends text to the last user's message, or to the system prompt if there is none."""
    index = next((at for at in range(len(messages) - 1, 0, -1) if messages[at].get("role") == "user"), 0)
    message = messages[index]
    content = message.get("content")
    added = [*content, {"type": "text", "text": f"\n\n{text}"}] if isinstance(content, list) else f"{content}\n\n{text}"
    messages[index] = {**message, "content": added}


def _shifted(chat: Chat, start: int, end: int) -> Any:
    """Marks of the first message, without these characters before them."""
    return tuple(
        mark
        if mark.message or mark.num_chars <= start
        else mark._replace(num_chars=max(start, mark.num_chars - end + start))
        for mark in chat.marks
    )
