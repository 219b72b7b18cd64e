"""Messages as clients send them, in the form that each kind of chat template takes."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from holdfast.router.text.adapted_messages import _short_id
from holdfast.router.text.chat import render_chat, template_traits
from holdfast.router.text.template_traits import TemplateTraits
from holdfast.worker.errors import InvalidRequestError
from tests.router.text.sample_templates import (
    CHATML,
    CODER,
    DEVELOPER,
    DROPPING,
    FIRST_SYSTEM,
    HERMES,
    NO_SYSTEM,
    NULL_CONTENT,
    ONE_CALL,
    SHORT_IDS,
)

ALL = {
    "chatml": CHATML,
    "hermes": HERMES,
    "coder": CODER,
    "first system": FIRST_SYSTEM,
    "dropping": DROPPING,
    "developer": DEVELOPER,
    "no system": NO_SYSTEM,
    "short ids": SHORT_IDS,
    "one call": ONE_CALL,
    "null content": NULL_CONTENT,
}
DEFAULTS = asdict(TemplateTraits())
NO_CALLS = {"shows_calls": False, "shows_tools": False}
NO_TOOLS = {**NO_CALLS, "shows_results": False}

OURS = "call_0123456789abcdef012345670_0"
"""An id as this server makes it."""


def turn(role: str, content: Any = "", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(name: Any = "f", arguments: Any = '{"city": "Bonn"}', call_id: str = OURS) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


HI = turn("user", "hi")

KIMI = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
)


def test_ids_have_names_where_a_template_writes_no_names():
    assert template_traits(KIMI).names_by_id
    turns = [
        HI,
        turn("assistant", "", tool_calls=[call("f", call_id="a"), call("g", "{}", call_id="b")]),
        turn("tool", "1", tool_call_id="b"),
        turn("tool", "2", tool_call_id="a"),
        turn("assistant", "", tool_calls=[call("f", call_id="c")]),
        turn("tool", "3", tool_call_id="c"),
    ]
    text = render_chat(KIMI, turns)
    ids = ["functions.f:0", "functions.g:1", "functions.g:1", "functions.f:0", "functions.f:2", "functions.f:2"]
    assert [
        piece.split("<")[0].split("\n")[0]
        for piece in text.replace("## Return of ", "<|tool_call_begin|>").split("<|tool_call_begin|>")[1:]
    ] == ids


def called(arguments: Any, content: str | None = "") -> list[dict[str, Any]]:
    return [HI, turn("assistant", content, tool_calls=[call(arguments=arguments)])]


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("chatml", NO_CALLS),
        ("hermes", {}),
        ("coder", {"shows_text_arguments": False}),
        ("first system", {"system": "first", **NO_TOOLS}),
        ("dropping", NO_TOOLS),
        ("developer", {"takes_developer": True, **NO_TOOLS}),
        ("no system", {"system": "none", "takes_equal_roles": False, **NO_TOOLS}),
        ("short ids", {"system": "first", "takes_equal_roles": False, "takes_long_ids": False}),
        ("one call", {"shows_calls_beside_text": False, "shows_several_calls": False}),
        (
            "null content",
            {
                "null_beside_calls": True,
                "shows_calls_beside_text": False,
                "takes_json_text": True,
                "shows_tools": False,
            },
        ),
    ],
)
def test_the_traits_of_a_template_are_found_by_rendering_it(name: str, traits: dict[str, Any]):
    found = asdict(template_traits(ALL[name]))
    assert {trait: value for trait, value in found.items() if value != DEFAULTS[trait]} == traits


@pytest.mark.parametrize("template", ["fine", "{{ strftime_now('%Y') }}", "{{ raise_exception('no') }}", "{{ x.y.z }}"])
def test_a_template_that_shows_no_messages_is_left_alone(template: str):
    assert template_traits(template) == TemplateTraits()


CASES = {
    "developer is system": ("chatml", [turn("developer", "D"), HI], "system\nD<|im_end|>\n<|im_start|>user"),
    "developer is dropped by nobody": ("dropping", [turn("developer", "D"), HI], "<system>D<user>hi"),
    "developer where it is named": ("developer", [turn("developer", "D"), HI], "<developer>D<user>hi"),
    "developer where there is no system": ("no system", [turn("developer", "D"), HI], "<user>D\n\nhi<model>"),
    "system and developer": (
        "first system",
        [turn("system", "S"), turn("developer", "D"), HI],
        "<system>S\n\nD<user>hi",
    ),
    "a system message in the middle": (
        "first system",
        [HI, turn("assistant", "yes"), turn("system", "S"), turn("user", "go")],
        "<system>S<user>hi<assistant>yes<user>go",
    ),
    "several where they are shown": ("chatml", [turn("system", "S"), turn("system", "T"), HI], "system\nT<|im_end|>"),
    "only system": ("no system", [turn("system", "S")], "<user>S<model>"),
    "users in a row": ("no system", [HI, turn("user", "there")], "<user>hi\n\nthere<model>"),
    "users in a row where they may": ("hermes", [HI, turn("user", "there")], "<user>hi<user>there"),
    "null beside calls": ("hermes", [HI, turn("assistant", None, tool_calls=[call()])], "<assistant><tool_call>{"),
    "no content beside calls": (
        "hermes",
        [HI, {"role": "assistant", "tool_calls": [call()]}],
        "<assistant><tool_call>",
    ),
    "null of an answer": ("chatml", [HI, turn("assistant", None), HI], "assistant\n<|im_end|>"),
    "null of a result": ("hermes", [HI, turn("tool", None, tool_call_id="x")], "<tool><assistant>"),
    "an empty list": ("hermes", [turn("user", [])], "<user><assistant>"),
    "no calls at all": ("one call", [HI, turn("assistant", "yes", tool_calls=[]), HI], "<assistant>yes<user>hi"),
    "calls that are null": ("one call", [HI, turn("assistant", "yes", tool_calls=None), HI], "<assistant>yes<user>hi"),
    "a refusal": ("hermes", [HI, turn("assistant", None, refusal="I won't")], "<assistant>I won't"),
    "a part that refuses": (
        "hermes",
        [HI, turn("assistant", [{"type": "text", "text": "No. "}, {"type": "refusal", "refusal": "Never."}])],
        "<assistant>No. Never.",
    ),
    "arguments that were cut": (
        "hermes",
        called('{"city": "B'),
        '{\\"city\\": \\"B',
    ),
    "the same where they must be an object": (
        "coder",
        called('{"city": "B'),
        '<parameter=arguments>{"city": "B</parameter>',
    ),
    "the same as text": (
        "null content",
        called('{"ci', None),
        '<call>f{"ci',
    ),
    "arguments with half a surrogate pair": ("hermes", called('{"a": "\\ud83d"}'), r"{\"a\": \"\\ud83d\"}"),
    "arguments with a whole one": ("hermes", called('{"a": "\\ud83d\\ude00"}'), '{"a": "😀"}'),
    "arguments that are a list": (
        "coder",
        called("[1]"),
        "=arguments>[1]<",
    ),
    "arguments that are null": (
        "hermes",
        called(None),
        '"arguments": {}}',
    ),
    "no arguments": ("coder", called(""), "<function=f></function>"),
    "arguments as an object": (
        "hermes",
        called({"a": "ü"}),
        '{"a": "ü"}',
    ),
    "an object as text": (
        "null content",
        called({"a": "ü"}),
        'f{"a": "ü"}',
    ),
    "an older call": (
        "hermes",
        [HI, turn("assistant", None, function_call={"name": "f", "arguments": "{}"}), turn("function", "21", name="f")],
        '"name": "f", "arguments": {}}</tool_call><tool>21',
    ),
    "ids of our own": (
        "short ids",
        [HI, turn("assistant", None, tool_calls=[call()]), turn("tool", "21", tool_call_id=OURS)],
        "[RESULT]21",
    ),
    "an older call where ids have nine letters": (
        "short ids",
        [HI, turn("assistant", None, function_call={"name": "f", "arguments": "{}"}), turn("function", "21", name="f")],
        "[RESULT]21",
    ),
    "calls and results without ids": (
        "short ids",
        [
            HI,
            turn("assistant", None, tool_calls=[call(call_id=""), {**call("g"), "id": None}, call("h")]),
            turn("tool", "8", tool_call_id=OURS),
            turn("tool", "9"),
            turn("tool", "1", tool_call_id=""),
        ],
        "[RESULT]9" + _short_id("1_0") + "[RESULT]1" + _short_id("1_1"),
    ),
    "two calls of one turn": (
        "one call",
        [
            HI,
            turn("assistant", "so", tool_calls=[call("f", "{}", "1"), call("g", "{}", "2")]),
            turn("tool", "two", tool_call_id="2"),
            turn("tool", "one", tool_call_id="1"),
        ],
        "<assistant>so<assistant>f({})<tool>one<assistant>g({})<tool>two<assistant>",
    ),
    "text beside a call": (
        "one call",
        [HI, turn("assistant", "so", tool_calls=[call("f", "{}")]), turn("tool", "one", tool_call_id=OURS)],
        "<assistant>so<assistant>f({})<tool>one",
    ),
    "text beside calls that want null": (
        "null content",
        [HI, turn("assistant", "so", tool_calls=[call("f", "{}")])],
        "<assistant>so<assistant><call>f{}</call>",
    ),
    "calls where none are known": (
        "chatml",
        [HI, turn("assistant", None, tool_calls=[call("f", '{"a": 1}')]), turn("tool", "21")],
        'assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n<|im_start|>tool\n21',
    ),
    "results where their role is refused": (
        "first system",
        [HI, turn("assistant", "so", tool_calls=[call("f", "{}")]), turn("tool", "21")],
        "</tool_call><user><tool_response>\n21\n</tool_response><assistant>",
    ),
    "results in a row": (
        "no system",
        [
            HI,
            turn("assistant", "", tool_calls=[call("f", "{}"), call("g", "{}")]),
            turn("tool", "1"),
            turn("tool", "2"),
        ],
        "<tool_response>\n1\n</tool_response>\n\n<tool_response>\n2\n</tool_response><model>",
    ),
    "fields that are null": ("hermes", [turn("user", "hi", name=None, tool_call_id=None)], "<user>hi"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_clients_send_reaches_the_model(case: str):
    name, messages, part = CASES[case]
    assert part in render_chat(ALL[name], messages)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([turn("user", None)], "chat.messages[0].content"),
        ([turn("user", [{"type": "image_url", "image_url": {"url": "x"}}])], "chat.messages[0].content[0].type"),
        ([turn("user", [{"type": "text"}])], "chat.messages[0].content[0].text"),
        ([HI, turn("assistant", "", tool_calls=[5])], "chat.messages[1].tool_calls[0]"),
        ([HI, turn("assistant", "", tool_calls={"a": 1})], "chat.messages[1].tool_calls"),
        ([HI, turn("assistant", "", tool_calls=[call(name=7)])], "chat.messages[1].tool_calls[0].function.name"),
        (
            called(7),
            "chat.messages[1].tool_calls[0].function.arguments",
        ),
        ([HI, turn("assistant", "", tool_calls=[{**call(), "type": "custom"}])], "chat.messages[1].tool_calls[0].type"),
        ([turn("user", "hi", name=["x"])], "chat.messages[0].name"),
        ([HI, turn("tool", "x", tool_call_id=7)], "chat.messages[1].tool_call_id"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(messages: list[dict[str, Any]], field: str):
    with pytest.raises(InvalidRequestError) as refused:
        render_chat(HERMES, messages)
    assert refused.value.field == field


def test_a_role_that_the_template_silently_drops_is_refused():
    assert "<critic>bad" in render_chat(HERMES, [HI, turn("critic", "bad")])
    with pytest.raises(InvalidRequestError, match="no messages of 'critic'"):
        render_chat(DROPPING, [HI, turn("critic", "bad")])


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}]


@pytest.mark.parametrize("name", ["chatml", "first system", "no system", "dropping"])
@pytest.mark.parametrize("messages", [[], [turn("system", "Be kind.")], [turn("developer", "Be kind.")]])
def test_tools_are_told_where_the_template_knows_none(name: str, messages: list[dict[str, Any]]):
    text = render_chat(ALL[name], [*messages, turn("user", "Hello!")], template_kwargs={"tools": TOOLS})
    assert json.dumps(TOOLS[0]) in text
    assert text.count("<tools>\n") == text.count("Hello!") == 1
    assert ("Be kind." in text) == bool(messages)
    assert text.index("<tools>") < text.index("Hello!")


@pytest.mark.parametrize("name", ["hermes", "coder", "short ids", "one call"])
def test_tools_are_left_to_a_template_that_knows_them(name: str):
    assert "# Tools" not in render_chat(ALL[name], [HI], template_kwargs={"tools": TOOLS})


@pytest.mark.parametrize("content", ["e", "1, 2, 3,", " spaced ", "", "<|im_end|>", "line\n"])
@pytest.mark.parametrize("name", ["chatml", "no system", "hermes"])
def test_a_final_message_is_continued(content: str, name: str):
    """The template of `no system` trims, and then so does the prompt."""
    shown = content.strip() if name == "no system" else content
    opening = {"chatml": "<|im_start|>assistant\n", "no system": "<model>", "hermes": "<assistant>"}[name]
    text = render_chat(ALL[name], [HI, turn("assistant", content)], continue_final_message=True)
    assert text.endswith(opening + shown)
    assert text == render_chat(ALL[name], [HI], False) + opening + shown


PLAIN = (
    [HI],
    [turn("system", "S"), HI, turn("assistant", "yes"), turn("user", "go")],
    [
        HI,
        turn("assistant", "", tool_calls=[call(arguments={"a": [1, "ü"]}, call_id="abcdefghi")]),
        turn("tool", "21", tool_call_id="abcdefghi"),
    ],
)


@pytest.mark.parametrize("name", ["hermes", "coder", "short ids", "one call", "chatml"])
@pytest.mark.parametrize("messages", PLAIN)
@pytest.mark.parametrize("continues", [False, True])
def test_what_a_template_takes_is_rendered_as_transformers_does(
    name: str, messages: list[dict[str, Any]], continues: bool
):
    from transformers.utils.chat_template_utils import render_jinja_template

    if name == "chatml" and messages is PLAIN[2]:
        return  # it drops the call
    theirs, _ = render_jinja_template(
        [messages], chat_template=ALL[name], add_generation_prompt=not continues, continue_final_message=continues
    )
    assert render_chat(ALL[name], messages, not continues, continue_final_message=continues) == theirs[0]
