"""Granite 4, LFM2, GLM, MiniMax-M2, Kimi K2, DeepSeek V3.2 and V4: what their templates write for a conversation with
calls is read back, cut anywhere.
"""

import json
from collections.abc import Sequence
from typing import Any

import jinja2
import pytest

from holdfast.router.text.chat import render_chat
from holdfast.router.text.dsml_templates import DSML_TEMPLATES
from holdfast.router.tools.call_events import CallArguments, CallBegin, Content
from holdfast.router.tools.chat_style import ChatReader, ChatStyle, detect_format
from holdfast.router.tools.reasoning import detect_reasoning
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
GLM = (
    "{{ text }}{% for call in calls %}\n<tool_call>{{ call.name }}\n{% for name, value in call.arguments.items() %}"
    "<arg_key>{{ name }}</arg_key>\n<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}"
)
MINIMAX = (
    "{{ text }}\n<minimax:tool_call>\n{% for call in calls %}"
    '<invoke name="{{ call.name }}">\n{% for name, value in call.arguments.items() %}'
    '<parameter name="{{ name }}">{{ value if value is string else value | tojson }}</parameter>\n'
    "{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>"
)
KIMI = (
    "{{ text }}<|tool_calls_section_begin|>{% for call in calls %}<|tool_call_begin|>functions.{{ call.name }}:"
    "{{ loop.index0 }}<|tool_call_argument_begin|>{{ call.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>"
)
TEMPLATES = {"hermes": GRANITE, "lfm2": LFM2, "glm45": GLM, "minimax_m2": MINIMAX, "kimi_k2": KIMI}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": 'São "Paulo"\n</tool_call> 日本', "days": -3, "place": {"at": [1.5, None]}, "exact": True}),
    ("now", {}),
]
TYPES = {"city": "string", "days": "integer", "place": "object", "exact": "boolean"}
WEATHER = {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}}
TOOLS = (Tool(name="weather", parameters=WEATHER), Tool(name="now"))


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


@pytest.mark.parametrize("name", DSML_TEMPLATES)
@pytest.mark.parametrize("text", ["", "Let me <look> at [that]: "])
def test_what_deepseeks_template_writes_is_read_back_at_every_cut(name, text):
    template = DSML_TEMPLATES[name]
    assert (detect_format(template), detect_reasoning(template)) == (name, "qwen3")
    calls = [
        {"id": f"{number}", "type": "function", "function": {"name": called, "arguments": json.dumps(arguments)}}
        for number, (called, arguments) in enumerate(CALLS)
    ]
    turn = {"role": "assistant", "content": text, "reasoning_content": "Hm.", "tool_calls": calls}
    chat = render_chat(template, [{"role": "user", "content": "hi"}, turn], template_kwargs={"thinking": True})
    start = "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜><think>Hm.</think>"
    assert chat.startswith(start)
    written = chat.removeprefix(start).removesuffix("<｜end▁of▁sentence｜>")
    for place in range(len(written) + 1):
        content, found = read(name, [written[:place], written[place:]])
        assert (content.strip(), found) == (text.strip(), CALLS), written[:place]


def test_chats_of_deepseek_are_those_of_its_encoders():
    """As `encoding_dsv32.py` and `encoding_dsv4.py` write them."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"s": "x", "n": [1, null]}'}}
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [called]},
        {"role": "tool", "content": "o", "tool_call_id": "a"},
    ]
    block = (
        '\n\n<｜DSML｜%s>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">x</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">[1, null]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜%s>'
    )
    ends = {
        "deepseek_v32": "\n\n<function_results>\n<result>o</result>\n</function_results>\n\n",
        "deepseek_v4": "<｜User｜><tool_result>o</tool_result><｜Assistant｜>",
    }
    for name, block_name in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls")):
        for thinks, before, after in ((True, "<think>r</think>", "<think>"), (False, "</think>", "</think>")):
            kwargs = {"tools": tools, "thinking": thinks}
            text = render_chat(DSML_TEMPLATES[name], turns, template_kwargs=kwargs)
            assert text.startswith("<｜begin▁of▁sentence｜>S\n\n## Tools\n")
            said = f"<｜User｜>u<｜Assistant｜>{before}{block % (block_name, block_name)}<｜end▁of▁sentence｜>"
            assert text.endswith(said + ends[name] + after)
    effort = render_chat(
        DSML_TEMPLATES["deepseek_v4"], turns[:2], template_kwargs={"thinking": True, "reasoning_effort": "max"}
    )
    assert effort.startswith("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum")
    assert effort.endswith("S<｜User｜>u<｜Assistant｜><think>")


def test_arguments_of_granite_that_are_text_with_json_are_read():
    written = rendered("hermes", [("weather", json.dumps({"city": "Bern", "days": 2}))], "")
    for place in range(len(written) + 1):
        assert read("hermes", [written[:place], written[place:]]) == ("", [("weather", {"city": "Bern", "days": 2})])
