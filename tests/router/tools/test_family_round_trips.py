"""Granite 4 and LFM2: what their templates write for a conversation with calls is read back, cut anywhere."""

import json
from collections.abc import Sequence
from typing import Any

import jinja2
import pytest

from holdfast.router.tools.call_events import CallArguments, CallBegin, Content
from holdfast.router.tools.chat_style import ChatReader, ChatStyle, detect_format
from holdfast.router.tools.tools import Tool

GRANITE = (
    "{{ text }}{% for call in calls %}{% if loop.index > 1 or text %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
LFM2 = (
    "{{ text }}<|tool_call_start|>[{% for call in calls %}{% if loop.index > 1 %}, {% endif %}{{ call.name }}("
    "{% for name, value in call.arguments.items() %}{% if loop.index > 1 %}, {% endif %}{{ name }}={{ value | pyjson }}"
    "{% endfor %}){% endfor %}]<|tool_call_end|>"
)
TEMPLATES = {"hermes": GRANITE, "lfm2": LFM2}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": 'São "Paulo"\n</tool_call> 日本', "days": -3, "place": {"at": [1.5, None]}, "exact": True}),
    ("now", {}),
]
TOOLS = (Tool(name="weather"), Tool(name="now"))


def rendered(name: str, calls: Sequence[tuple[str, Any]], text: str) -> str:
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters["pyjson"] = repr
    given = [{"name": called, "arguments": arguments} for called, arguments in calls]
    return environment.from_string(TEMPLATES[name]).render(calls=given, text=text)


def read(name: str, pieces: Sequence[str]) -> tuple[str, list[tuple[str, Any]]]:
    reader = ChatReader(ChatStyle(call_format=name), TOOLS, splits=False, begins_inside=False, is_filtered=False)
    events = [event for piece in pieces for event in reader.push(piece)] + reader.finish()
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.json
    content = "".join(event.text for event in events if isinstance(event, Content))
    return content, [(called, json.loads(arguments)) for called, arguments in calls]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", ["", "Let me <look> at [that]: "])
def test_what_the_template_writes_is_read_back_at_every_cut(name, text):
    assert detect_format(TEMPLATES[name]) == name
    written = rendered(name, CALLS, text)
    content, calls = read(name, [written])
    assert (content.strip(), calls) == (text.strip(), CALLS)
    assert read(name, list(written)) == (content, calls)
    for place in range(len(written) + 1):
        assert read(name, [written[:place], written[place:]]) == (content, calls), written[:place]


def test_arguments_of_granite_that_are_text_with_json_are_read():
    written = rendered("hermes", [("weather", json.dumps({"city": "Bern", "days": 2}))], "")
    for place in range(len(written) + 1):
        assert read("hermes", [written[:place], written[place:]]) == ("", [("weather", {"city": "Bern", "days": 2})])
