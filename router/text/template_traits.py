"""Traits of a chat template: which messages it shows, found by rendering short chats once per template.

A template does not declare the messages it accepts, and refuses or silently drops others.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

Turn: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Turn], Sequence[Mapping[str, Any]] | None], str]
"""Renders messages and tools by the template. Raises the template's errors."""

_SYSTEM, _LATER, _USER, _AGAIN, _SAID = "Qzsystem", "Qzlater", "Qzuser", "Qzagain", "Qzsaid"
_TOOL, _OTHER, _VALUE, _RESULT, _CUT = "qztool", "qzother", "Qzvalue", "Qzresult", "Qzcut"
_DEVELOPER: Final = re.compile(r"""['"]developer['"]""")
_FUNCTION: Final = re.compile(r"""role['"\]]*\s*(==|in)[^%}]*['"]function['"]""")
"""A template that compares a role with `function`. The word alone is no sign: templates also use it for tools."""

_ID, _SHORT_ID = "call_0123456789abcdef01234567_0", "qz0000001"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """Traits of one template. The defaults are those of a template that takes everything."""

    takes_developer: bool = False
    """Whether it knows the role; else developer messages become system messages."""
    takes_function: bool = False
    """Whether it knows the older role of tool results."""
    system: Literal["any", "first", "none"] = "any"
    """Place of system messages: anywhere, one at the beginning, or nowhere."""
    takes_equal_roles: bool = True
    """Whether it shows both of two successive messages of one role; else turns must alternate."""
    null_beside_calls: bool = False
    """Whether it shows calls only beside null content, not beside an empty text."""
    shows_calls: bool = True
    shows_calls_beside_text: bool = True
    shows_several_calls: bool = True
    takes_json_text: bool = False
    """Whether it takes arguments only as their JSON text; else as an object."""
    shows_text_arguments: bool = True
    """Whether it shows arguments that are text, such as invalid JSON; otherwise they must be an object."""
    shows_results: bool = True
    takes_long_ids: bool = True
    """Whether it takes ids of calls as this server makes them; else they must be nine letters or digits."""
    shows_tools: bool = True
    names_by_id: bool = False
    """Whether it writes a call's id in place of its name (Kimi K2), which then has the name: `functions.f:0`."""


def traits_of(template: str, render: Render) -> TemplateTraits:
    """The traits of a template that `render` renders. A template that does not even show a user's message is not probed
    further.
    """
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
    """Renders chats, and looks for texts in the results."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def text(self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
        """Rendered text; None for a chat that the template refuses."""
        try:
            return self._render(messages, tools)
        except Exception:  # noqa: BLE001 - a template may raise anything: it is a refusal, which is a trait
            return None

    def shows(self, messages: Sequence[Turn], *texts: str, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Whether all the texts are there."""
        rendered = self.text(messages, tools)
        return rendered is not None and all(text in rendered for text in texts)


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
    """Traits of calls in the history, and of their results."""
    objects, texts = _Calls(probe, {"qzkey": _VALUE}), _Calls(probe, f'{{"qzkey": "{_VALUE}"}}')
    calls = objects if objects.are_shown("") or objects.are_shown(None) else texts
    is_null = not calls.are_shown("") and calls.are_shown(None)
    content = None if is_null else ""
    if not is_null and not calls.are_shown(""):
        return {"shows_calls": False, "shows_results": objects.shows_result_of_text()}
    takes_long_ids = calls.shows_result(content, _ID) or not calls.shows_result(content, _SHORT_ID)
    return {
        "null_beside_calls": is_null,
        "shows_calls_beside_text": calls.show(_SAID, _SAID, _TOOL) or not calls.show_split(content),
        "shows_several_calls": calls.show_several(content),
        "takes_json_text": calls is texts,
        "shows_text_arguments": _Calls(probe, _CUT).show(content, _CUT),
        "shows_results": calls.shows_result(content, _ID) or calls.shows_result(content, _SHORT_ID),
        "takes_long_ids": takes_long_ids,
        "names_by_id": calls.show(content, _ID) and not calls.show(content, _TOOL),
    }


class _Calls:
    """Chats in which the model has called tools with such arguments. Ids are of either length, but where they are asked
    about.
    """

    def __init__(self, probe: _Probe, arguments: object) -> None:
        self._probe = probe
        self._arguments = arguments

    def are_shown(self, content: str | None) -> bool:
        """Whether a call leaves any mark beside such content."""
        without = self._probe.text([_user(), {"role": "assistant", "content": content}])
        found = [self._probe.text([_user(), self._called(content, one)]) for one in (_ID, _SHORT_ID)]
        return any(text is not None and (text != without or _TOOL in text) for text in found)

    def show(self, content: str | None, *texts: str, names: Sequence[str] = (_TOOL,)) -> bool:
        chats = [[_user(), self._called(content, one, names)] for one in (_ID, _SHORT_ID)]
        return any(self._probe.shows(chat, *texts) for chat in chats)

    def show_split(self, content: str | None) -> bool:
        """Whether a chat can continue with text in a separate turn before the calls."""
        before, after = ({"role": "assistant", "content": text} for text in (_SAID, _LATER))
        chats = [
            [_user(), before, self._called(content, one), _result(one), after, _user(_AGAIN)]
            for one in (_ID, _SHORT_ID)
        ]
        return any(self._probe.shows(chat, _SAID, _TOOL, _RESULT, _LATER, _AGAIN) for chat in chats)

    def show_several(self, content: str | None) -> bool:
        """Whether a template that does not write names takes several calls."""
        texts = (_TOOL, _OTHER) if self.show(content, _TOOL) else ()
        return self.show(content, *texts, names=(_TOOL, _OTHER))

    def shows_result(self, content: str | None, call_id: str) -> bool:
        return self._probe.shows([_user(), self._called(content, call_id), _result(call_id)], _RESULT)

    def shows_result_of_text(self) -> bool:
        """Whether a result is shown after a call that is written as text."""
        return self._probe.shows([_user(), {"role": "assistant", "content": _SAID}, _result(_ID)], _SAID, _RESULT)

    def _called(self, content: str | None, call_id: str, names: Sequence[str] = (_TOOL,)) -> Turn:
        functions = ({"name": name, "arguments": self._arguments} for name in names)
        calls = [{"id": call_id, "type": "function", "function": function} for function in functions]
        return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(call_id: str) -> Turn:
    return {"role": "tool", "content": _RESULT, "tool_call_id": call_id, "name": _TOOL}


FORMAT: Final = "hermes"
"""Format in `router/tools/chat_style.py`."""

_BEFORE: Final = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_END: Final = "\n</tools>"
_HOW: Final = """

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def tools_text(tools: Sequence[Mapping[str, Any]], *, says_how: bool = True) -> str:
    """Text about tools for the system message, in OpenAI's shape. `says_how`: describe the format of calls; not for a
    model whose template has its own format.
    """
    text = _BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _END
    return text + _HOW if says_how else text


def calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls of an earlier turn as the model would have written them."""
    return "\n".join(f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in calls)


def _call_text(function: Mapping[str, Any]) -> str:
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {written}}}'


def result_text(content: str) -> str:
    """A call's result, in a user's message."""
    return f"<tool_response>\n{content}\n</tool_response>"
