"""Qwen3.5 and Nemotron 3: what their template writes for a conversation is read back, cut anywhere, in thoughts too."""

import json
from collections.abc import Sequence
from typing import Any

import jinja2
import pytest

from holdfast.router.tools.call_events import CallArguments, CallBegin, Content
from holdfast.router.tools.chat_style import ChatReader, ChatStyle, Reasoning
from holdfast.router.tools.tools import Tool

TEMPLATE = (
    "{{ thoughts }}{% if closed %}\n</think>\n\n{% endif %}{{ text }}"
    "{% for call in calls %}{% if loop.index > 1 or text %}\n{% endif %}<tool_call>\n<function={{ call.name }}>\n"
    "{% for name, value in call.arguments.items() %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
"""An assistant's turn behind `<think>\\n`, as Qwen3.5 writes it; `closed`: with the end of the thoughts."""

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "place": {"type": "object"},
        "exact": {"type": "boolean"},
    },
}
TOOLS = (Tool(name="weather", parameters=SCHEMA), Tool(name="now"))
ARGUMENTS = {
    "city": 'São "Paulo"\n</p> 日本',
    "days": -3,
    "place": {"at": [1.5, None], "of": {"name": "ü"}},
    "exact": True,
}
STYLE = ChatStyle(
    call_format="qwen3_coder", reasoning="qwen3", token_ids={"<think>": 1, "</think>": 2, "<tool_call>": 3}
)


def rendered(thoughts: str, calls: Sequence[tuple[str, dict[str, Any]]], *, closed: bool, text: str = "") -> str:
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    given = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return environment.from_string(TEMPLATE).render(thoughts=thoughts, calls=given, closed=closed, text=text)


def read(pieces: Sequence[str], tools: Sequence[Tool] = TOOLS) -> tuple[str, str, list[tuple[str, Any]]]:
    """Thoughts, content and calls of an output that begins inside thoughts."""
    reader = ChatReader(STYLE, tools, splits=True, begins_inside=True, is_filtered=False)
    events = [event for piece in pieces for event in reader.push(piece)] + reader.finish()
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.json
    thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    return thoughts, content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("calls", [[("weather", ARGUMENTS)], [("now", {}), ("weather", {"city": "", "days": 10**20})]])
def test_what_the_template_writes_is_read_back_at_every_cut(calls, closed):
    text = rendered("Is <tool_call> right? ", calls, closed=closed)
    expected = ("Is <tool_call> right?", "", calls)
    assert read([text]) == read(list(text)) == expected
    for place in range(len(text) + 1):
        assert read([text[:place], text[place:]]) == expected, text[:place]


def test_thoughts_that_only_speak_of_calls_stay_thoughts():
    text = "I write <tool_call> then\n<function=f>, or <tool_call>\n<functio"
    assert read(list(text)) == read([text]) == (text, "", [])
    text = "<tool_call>\n<function=weather>\n</function>\n</tool_call>"
    assert read([text], tools=()) == (text, "", [])


def test_a_malformed_call_in_thoughts_is_content():
    text = "Hm <tool_call>\n<function=" + "x" * 300
    thoughts, content, calls = read(list(text))
    assert (thoughts, calls) == ("Hm", [])
    assert content.startswith("<tool_call>\n<function=")


def test_tokens_of_a_call_in_thoughts_are_not_counted_as_thoughts():
    reader = ChatReader(STYLE, TOOLS, splits=True, begins_inside=True, is_filtered=False)
    for text, token in (
        ("a", 7),
        ("<tool_call>", 3),
        ("b", 7),
        ("<tool_call>", 3),
        ("\n<fun", 8),
        ("ction=", 9),
        ("now>", 9),
    ):
        reader.push(text, [token])
    assert reader.num_reasoning_tokens == 3
