"""Traits of a chat template: which messages it shows, found by rendering short chats once per template.

A template says nowhere what it takes, and refuses or silently drops the rest. What may not live here: what is done
about it (`adapted_messages.py`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

Turn: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Turn], Sequence[Mapping[str, Any]] | None], str]
"""Renders messages and tools by the template. Raises whatever the template raises."""

_SYSTEM, _LATER, _USER, _AGAIN, _SAID = "Qzsystem", "Qzlater", "Qzuser", "Qzagain", "Qzsaid"
_TOOL, _OTHER, _VALUE, _RESULT, _CUT = "qztool", "qzother", "Qzvalue", "Qzresult", "Qzcut"
_DEVELOPER: Final = re.compile(r"""['"]developer['"]""")
_FUNCTION: Final = re.compile(r"""role['"\]]*\s*(==|in)[^%}]*['"]function['"]""")
"""The word alone says nothing: templates write it of tools, too."""

_ID, _SHORT_ID = "call_0123456789abcdef01234567_0", "qz0000001"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """What one template takes. The defaults are those of a template that takes everything."""

    takes_developer: bool = False
    """It knows the role; else developer messages are system messages."""
    takes_function: bool = False
    """It knows the older role of tool results."""
    system: Literal["any", "first", "none"] = "any"
    """Where it shows system messages: anywhere, one at the beginning, or nowhere."""
    takes_equal_roles: bool = True
    """It shows both of two messages of one role that follow each other; else turns must alternate."""
    null_beside_calls: bool = False
    """It shows calls beside null content alone, rather than beside an empty text."""
    shows_calls: bool = True
    shows_calls_beside_text: bool = True
    shows_several_calls: bool = True
    shows_text_arguments: bool = True
    """It shows arguments that are a text; else they must be an object."""
    shows_results: bool = True
    takes_long_ids: bool = True
    """It takes ids of calls as this server makes them; else they must be nine letters or digits."""
    shows_tools: bool = True


def traits_of(template: str, render: Render) -> TemplateTraits:
    """The traits of a template that `render` renders. One that does not even show a user's message is left alone."""
    probe = _Probe(render)
    if not probe.shows([_user()], _USER):
        return TemplateTraits()
    return TemplateTraits(
        takes_developer=_DEVELOPER.search(template) is not None
        and probe.shows([_system("developer"), _user()], _SYSTEM, _USER),
        takes_function=_FUNCTION.search(template) is not None,
        system=_system_trait(probe),
        takes_equal_roles=_takes_equal_roles(probe),
        shows_tools=_shows_tools(probe),
        **_call_traits(probe),
    )


def drops_role(role: str, render: Render) -> bool:
    """Whether a template passes over messages of a role without a word, though it shows those around them."""
    probe = _Probe(render)
    around = [_user(), {"role": "assistant", "content": _SAID}, {"role": "user", "content": _AGAIN}]
    with_role = [*around, {"role": role, "content": _RESULT}]
    return probe.shows(around, _USER) and probe.shows(with_role, _USER) and not probe.shows(with_role, _RESULT)


class _Probe:
    """Renders chats, and looks for texts in what comes out."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def shows(self, messages: Sequence[Turn], *texts: str, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Whether all the texts are there. A chat that the template refuses shows nothing."""
        try:
            rendered = self._render(messages, tools)
        except Exception:  # a template may raise anything
            return False
        return all(text in rendered for text in texts)


def _user(content: str = _USER) -> Turn:
    return {"role": "user", "content": content}


def _system(role: str = "system", content: str = _SYSTEM) -> Turn:
    return {"role": role, "content": content}


def _system_trait(probe: _Probe) -> Literal["any", "first", "none"]:
    first, later = _system(), _system(content=_LATER)
    if not probe.shows([first, _user()], _SYSTEM, _USER):
        return "none"
    said: Turn = {"role": "assistant", "content": _SAID}
    takes_two = probe.shows([first, later, _user()], _SYSTEM, _LATER, _USER)
    takes_later = probe.shows([first, _user(), said, later, _user(_AGAIN)], _SYSTEM, _USER, _LATER, _AGAIN)
    return "any" if takes_two and takes_later else "first"


def _takes_equal_roles(probe: _Probe) -> bool:
    said: Turn = {"role": "assistant", "content": _SAID}
    if not probe.shows([_user(), said, _user(_AGAIN)], _USER, _SAID, _AGAIN):
        return True  # it shows no conversation at all
    return probe.shows([_user(), _user(_AGAIN)], _USER, _AGAIN)


def _shows_tools(probe: _Probe) -> bool:
    tools = [{"type": "function", "function": {"name": _TOOL, "description": _VALUE, "parameters": {"type": "object"}}}]
    return any(probe.shows(chat, _TOOL, tools=tools) for chat in ([_user()], [_system(), _user()]))


def _call_traits(probe: _Probe) -> dict[str, bool]:
    """Of calls in the history, and their results."""
    calls = _Calls(probe)
    shows_calls = calls.alone("") or calls.alone(None)
    content = None if shows_calls and not calls.alone("") else ""
    if not shows_calls:
        return {"shows_calls": False, "shows_results": calls.shows_result_of_text()}
    has_results = calls.with_result(content, _ID)
    takes_long_ids = has_results or not calls.with_result(content, _SHORT_ID)
    return {
        "null_beside_calls": content is None,
        "shows_calls_beside_text": calls.alone(_SAID, _SAID) or not calls.split(_SAID, content),
        "shows_several_calls": calls.several(content),
        "shows_text_arguments": calls.alone(content, _CUT, arguments=_CUT),
        "shows_results": has_results or not takes_long_ids,
        "takes_long_ids": takes_long_ids,
    }


class _Calls:
    """Chats in which the model has called tools."""

    def __init__(self, probe: _Probe) -> None:
        self._probe = probe

    def alone(self, content: str | None, *texts: str, arguments: object = None) -> bool:
        return any(self._with_id(content, call_id, arguments, texts) for call_id in (_ID, _SHORT_ID))

    def _with_id(self, content: str | None, call_id: str, arguments: object, texts: Sequence[str]) -> bool:
        wanted = texts or (_VALUE,)
        return self._probe.shows([_user(), _called(content, call_id, arguments=arguments)], _TOOL, *wanted)

    def with_result(self, content: str | None, call_id: str) -> bool:
        return self._probe.shows([_user(), _called(content, call_id), _result(call_id)], _TOOL, _RESULT)

    def split(self, text: str, content: str | None) -> bool:
        """Whether the text is shown in a turn of its own before the calls."""
        said: Turn = {"role": "assistant", "content": text}
        return any(
            self._probe.shows([_user(), said, _called(content, call_id)], text, _TOOL) for call_id in (_ID, _SHORT_ID)
        )

    def several(self, content: str | None) -> bool:
        return any(
            self._probe.shows([_user(), _called(content, call_id, names=(_TOOL, _OTHER))], _TOOL, _OTHER)
            for call_id in (_ID, _SHORT_ID)
        )

    def shows_result_of_text(self) -> bool:
        """Whether a result is shown after a call that is written as text."""
        return self._probe.shows([_user(), {"role": "assistant", "content": _SAID}, _result(_ID)], _SAID, _RESULT)


def _called(content: str | None, call_id: str, *, arguments: object = None, names: Sequence[str] = (_TOOL,)) -> Turn:
    given = {"qzkey": _VALUE} if arguments is None else arguments
    calls = [{"id": call_id, "type": "function", "function": {"name": name, "arguments": given}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(call_id: str) -> Turn:
    return {"role": "tool", "content": _RESULT, "tool_call_id": call_id, "name": _TOOL}
