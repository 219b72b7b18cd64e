"""Tool call parsers: the formats as models write them, and what holds for any text, cut anywhere."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.tools.call_events import CallArguments, CallBegin, CallEnd, CallEvent, Content, merged
from holdfast.router.tools.chat_style import FORMATS, parser_for
from holdfast.router.tools.tools import checked_tools
from holdfast.worker.errors import InvalidRequestError
from tests.router.tools.call_texts import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DSML,
    GLM,
    HERMES,
    KIMI,
    MINIMAX,
    MISTRAL,
    PYTHONIC,
    XML,
    call,
    parsed,
)

CASES: list[tuple[str, str, list[CallEvent]]] = [
    ("hermes", HERMES, call(0, "f", '{"s": "a\\"}", "n": [1, 2.5e3, {}]}')),
    ("hermes", f" Hm.\n{HERMES}", [Content(" Hm.\n"), *call(0, "f", '{"s": "a\\"}", "n": [1, 2.5e3, {}]}')]),
    (
        "hermes",
        '\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"arguments": {"a": 1}, "name": "g"}',
        [*call(0, "f", "{}"), *call(1, "g", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> bye', [*call(0, "f", "{}"), Content(" bye")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"id": [{}], "name": "f", "arguments": null, "x": 1}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call(0, "f", '{"a": 1}')),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "1\n\\$"}}</tool_call>',
        call(0, "f", '{"a": "1\\n\\\\$"}'),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"\\u00e9": "\\u00"}}', call(0, "f", '{"\\u00e9": "\\\\u00"}')),
    (
        "gemma4",
        'So: <|tool_call>call:f{s:<|"|>a "b"\n{é}<|"|>,n:-2.5e3,o:{a:[],b:[1,<|"|>,<|"|>,{}]},b:true}<tool_call|>'
        "<|tool_call>call:g{}<tool_call|>",
        [
            Content("So: "),
            *call(0, "f", '{"s": "a \\"b\\"\\n{é}", "n": -2.5e3, "o": {"a": [], "b": [1, ",", {}]}, "b": true}'),
            *call(1, "g", "{}"),
        ],
    ),
    ("gemma4", "<|tool_call>f{}<tool_call|>", [Content("<|tool_call>f{}<tool_call|>")]),
    ("llama3_json", '{"name": "f", "parameters": {"n": 1}}', call(0, "f", '{"n": 1}')),
    (
        "llama3_json",
        'So:\n<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "arguments": {}}',
        [Content("So:\n"), *call(0, "f", "{}"), *call(1, "g", "{}")],
    ),
    ("llama3_json", 'I call:\n  {"name": "f", "parameters": {}}', [Content("I call:\n  "), *call(0, "f", "{}")]),
    ("mistral", MISTRAL, [*call(0, "f", '{"s": "x"}'), *call(1, "g", '{"n": 1}')]),
    (
        "mistral",
        'Ok.[TOOL_CALLS]f[ARGS]{"s": "x"}[TOOL_CALLS]g[CALL_ID]a1[ARGS]{}[TOOL_CALLS]h{}',
        [Content("Ok."), *call(0, "f", '{"s": "x"}'), *call(1, "g", "{}"), *call(2, "h", "{}")],
    ),
    (
        "pythonic",
        PYTHONIC,
        [*call(0, "f", '{"s": "a\\n\'é", "n": [1, [2], -3.5], "b": true, "d": {"k": null}}'), *call(1, "g", "{}")],
    ),
    (
        "llama4_pythonic",
        "Look:\n<|python_start|>[f(n=1,)]<|python_end|>",
        [Content("Look:\n"), *call(0, "f", '{"n": 1}')],
    ),
    (
        "lfm2",
        'a <|tool_call_start|>[f(s="x")]<|tool_call_end|> b',
        [Content("a "), *call(0, "f", '{"s": "x"}'), Content(" b")],
    ),
    ("qwen3_coder", XML, call(0, "f", '{"s": "one\\ntwo \\"2\\"", "n": 3, "b": true}')),
    ("qwen3_coder", "<function=g>\n</function>", call(0, "g", "{}")),
    (
        "qwen3_coder",
        "<tool_call><function=g><parameter=s>1</parameter></function></tool_call>\n" + XML.replace("3", "[1,"),
        [*call(0, "g", '{"s": "1"}'), *call(1, "f", '{"s": "one\\ntwo \\"2\\"", "n": "[1,", "b": true}')],
    ),
    ("deepseek_v3", DEEPSEEK_V3, [*call(0, "f", '{"s": "x"}'), *call(1, "g", "{}")]),
    ("deepseek_v31", "Hm" + DEEPSEEK_V31, [Content("Hm"), *call(0, "f", '{"s": "x"}')]),
    ("glm45", f"So:\n{GLM}", [Content("So:\n"), *call(0, "f", '{"s": "one\\ntwo \\"2\\"", "n": 3}')]),
    (
        "glm45",
        "<tool_call>g</tool_call>\n<tool_call>f<arg_key>s</arg_key><arg_value>1</arg_value></tool_call>",
        [*call(0, "g", "{}"), *call(1, "f", '{"s": "1"}')],
    ),
    ("minimax_m2", MINIMAX, [*call(0, "f", '{"s": "é\\n{", "b": true}'), *call(1, "g", "{}")]),
    (
        "deepseek_v32",
        f"Hm\n\n{DSML}",
        [Content("Hm\n\n"), *call(0, "f", '{"s": "12", "n": {"a": [1, null]}}'), *call(1, "g", "{}")],
    ),
    ("deepseek_v4", DSML.replace("function_calls", "tool_calls"), parsed("deepseek_v32", [DSML])),
    ("kimi_k2", f"Ok {KIMI}", [Content("Ok "), *call(0, "f", '{"s": "x", "n": 1}'), *call(1, "g", "{}")]),
]

BROKEN: list[tuple[str, str, list[CallEvent]]] = [
    ("hermes", "a < b <tool_cal", [Content("a < b <tool_cal")]),
    ("hermes", "<tool_call>no</tool_call>", [Content("<tool_call>no</tool_call>")]),
    ("hermes", '<tool_call>x<tool_call>{"name": "f"}', [Content("<tool_call>x"), *call(0, "f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', [Content('<tool_call>{"name": "f", "arguments": [1]}')]),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}', [Content('<tool_call>{"name": "", "arguments": {}}')]),
    ("hermes", '<tool_call>{"name": "\\ud800"}', [Content('<tool_call>{"name": "\\ud800"}')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1 2}}</tool_call>',
        [CallBegin(0, "f"), CallArguments(0, '{"a": 1 '), CallEnd(0, False), Content("2}}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": tr',
        [CallBegin(0, "f"), CallArguments(0, '{"a": tr'), CallEnd(0, False)],
    ),
    ("llama3_json", '{"name": "Bob", "age": 3}', [Content('{"name": "Bob", "age": 3}')]),
    ("llama3_json", 'x {"name": "f", "parameters": {}}', [Content('x {"name": "f", "parameters": {}}')]),
    ("mistral", "[TOOL_CALLS] f", [Content("[TOOL_CALLS] f")]),
    ("pythonic", "[text](address)", [Content("[text](address)")]),
    ("pythonic", "[1, 2]", [Content("[1, 2]")]),
    ("pythonic", "[f(x)]", [Content("[f(x)]")]),
    ("pythonic", "[f(x==1)]", [Content("[f(x==1)]")]),
    ("pythonic", "a [f()]", [Content("a [f()]")]),
    (
        "pythonic",
        "[f(x=1j)]",
        [CallBegin(0, "f"), CallArguments(0, '{"x": '), CallEnd(0, False), Content("1j)]")],
    ),
    ("qwen3_coder", "<function=>", [Content("<function=>")]),
    ("qwen3_coder", "<function=" + "x" * 300, [Content("<function=" + "x" * 300)]),
    (
        "qwen3_coder",
        "<function=f><parameter=s>\nab",
        [CallBegin(0, "f"), CallArguments(0, '{"s": "ab'), CallEnd(0, False)],
    ),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>?", [Content("<｜tool▁calls▁begin｜>?")]),
    ("glm45", "<tool_call>{}</tool_call>", [Content("<tool_call>{}</tool_call>")]),
    ("minimax_m2", "<minimax:tool_call>\nf", [Content("<minimax:tool_call>\nf")]),
    ("kimi_k2", "<|tool_calls_section_begin|>f", [Content("<|tool_calls_section_begin|>f")]),
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="no">x',
        [
            CallBegin(0, "f"),
            CallArguments(0, "{"),
            CallEnd(0, False),
            Content('\n<｜DSML｜parameter name="s" string="no">x'),
        ],
    ),
]


@pytest.mark.parametrize(("name", "text", "events"), CASES + BROKEN)
def test_calls_are_read_and_what_is_no_call_is_content(name: str, text: str, events: list[CallEvent]):
    assert parsed(name, [text]) == events
    assert parsed(name, list(text)) == events


TYPED = checked_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {
                    "type": "object",
                    "$defs": {
                        "text": {"type": "string", "minLength": 1},
                        "count": {"type": "integer"},
                        "far": {"$ref": "#/$defs/text"},
                    },
                    "properties": {
                        "maybe": {"type": ["string", "null"]},
                        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "number": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                        "mixed": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
                        "text": {"$ref": "#/$defs/text"},
                        "far": {"$ref": "#/$defs/far"},
                        "all": {"allOf": [{"$ref": "#/$defs/text"}], "description": "d"},
                        "two": {"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]},
                        "count": {"allOf": [{"$ref": "#/$defs/count"}]},
                        "tag": {"enum": ["1", 2, None]},
                        "any": {},
                        "whole": {"type": ["integer", "string"]},
                    },
                    "allOf": [{"properties": {"inner": {"type": "integer"}}}],
                },
            },
        }
    ]
)


@pytest.mark.parametrize(
    ("parameter", "written", "value"),
    [
        ("maybe", "123", "123"),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "true", "true"),
        ("maybe", "[1]", "[1]"),
        ("maybe", '"a b"', "a b"),
        ("maybe", "a\nb", "a\nb"),
        ("either", "4.5", "4.5"),
        ("either", "null", None),
        ("number", "12", 12),
        ("number", "None", None),
        ("mixed", "12", 12),
        ("mixed", "1.5", "1.5"),
        ("mixed", "x", "x"),
        ("text", "12", "12"),
        ("far", "null", "null"),
        ("all", "{}", "{}"),
        ("two", "7", "7"),
        ("count", "7", 7),
        ("tag", "1", "1"),
        ("tag", "2", 2),
        ("tag", "null", None),
        ("any", "[1, 2]", [1, 2]),
        ("any", "word", "word"),
        ("whole", "3.0", 3.0),
        ("whole", "3.5", "3.5"),
        ("inner", "5", 5),
        ("undeclared", "5", "5"),
    ],
)
def test_values_without_quotation_marks_have_the_type_of_their_schema(parameter: str, written: str, value: object):
    text = f"<tool_call>\n<function=f>\n<parameter={parameter}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], list(text)):
        parser = parser_for("qwen3_coder", TYPED)
        events = merged([*(event for piece in pieces for event in parser.push(piece)), *parser.finish()])
        assert [type(event) for event in events] == [CallBegin, CallArguments, CallEnd]
        read = json.loads(next(event.json for event in events if isinstance(event, CallArguments)))[parameter]
        assert (read, type(read)) == (value, type(value))


CALLS_ONLY = {
    "hermes": HERMES,
    "qwen3_coder": XML,
    "gemma4": '<|tool_call>call:f{s:<|"|>x<|"|>,n:1}<tool_call|>',
    "lfm2": '<|tool_call_start|>[f(s="x")]<|tool_call_end|>',
    "llama4_pythonic": "<|python_start|>[f(n=1,)]<|python_end|>",
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DSML,
    "glm45": GLM,
    "kimi_k2": KIMI,
    "minimax_m2": MINIMAX,
}


@pytest.mark.parametrize("name", CALLS_ONLY)
def test_outputs_that_are_cut_after_a_call_has_begun_leave_no_content(name: str):
    """One call, or a second one after it, cut at each character."""
    once = CALLS_ONLY[name]
    for text in (once, f"{once}\n{once}"):
        has_begun = False
        for end in range(len(text) + 1):
            events = parsed(name, [text[:end]])
            assert events == parsed(name, list(text[:end]))
            has_begun |= any(isinstance(event, CallBegin) for event in events)
            content = [event.text for event in events if isinstance(event, Content)]
            assert not (has_begun and content), (text[:end], content)
        assert has_begun


def test_tags_that_end_no_call_are_no_content_after_one():
    cases = [
        ("hermes", f"{HERMES}\n</tool_call>\n", []),
        ("hermes", f"{HERMES} So </tool_call>it is.</tool_", [Content(" So it is.")]),
        ("hermes", f"{HERMES} 1 <", [Content(" 1 <")]),
        ("hermes", f"{HERMES} <", []),
        ("qwen3_coder", f"{XML}</function>\n</tool_call", []),
    ]
    for name, text, contents in cases:
        assert [event for event in parsed(name, list(text)) if isinstance(event, Content)] == contents, text


def test_arguments_stream():
    parser = parser_for("hermes")
    assert parser.push('<tool_call>{"name": "f", "argu') == []
    assert parser.push('ments": {"a": "b') == [CallBegin(0, "f"), CallArguments(0, '{"a": "b')]
    assert parser.push("cd") == [CallArguments(0, "cd")]
    assert parser.push('", "n": 12') == [CallArguments(0, '", "n": ')]
    assert parser.push("3}") == [CallArguments(0, "123}"), CallEnd(0)]
    assert parser.push("}\n</tool_call>") == parser.finish() == []


def test_content_streams_and_waits_no_longer_than_a_marker_may_begin():
    parser = parser_for("hermes")
    assert parser.push("a <") == [Content("a ")]
    assert parser.push("b <tool_call") == [Content("<b ")]
    assert parser.push("x") == [Content("<tool_callx")]


MARKS = (
    "<tool_call> </tool_call> <|python_tag|> [TOOL_CALLS] [ARGS] <function= <parameter= </parameter> </function> > "
    "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> ```json function ; f f( ) "
    "= ' , x=1 "
    '<|python_start|> <|tool_call_start|> <|tool_call_end|> True None null 1 e - { } [ ] " \\ \\u00e u ü \\n'
)
FRAGMENTS = [
    *MARKS.split(),
    *('{"name": "f", ', '"arguments": ', '"parameters": ', '{"a": "b", "c": [1, {}]}', '"name": ', ": "),
    *(" ", "\n", "\u00a0", "\x00"),
    *(text for _, text, _ in CASES),
]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("qwen3_xml", "llama4_json")])
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12),
    places=st.lists(st.integers(min_value=0, max_value=2000), max_size=8),
)
def test_events_do_not_depend_on_how_the_text_is_cut(name: str, fragments: list[str], places: list[int]):
    text = "".join(fragments)
    whole = parsed(name, [text])
    assert parsed(name, cut(text, places)) == parsed(name, list(text)) == whole
    check_order(whole)
    if not any(isinstance(event, CallBegin) for event in whole):
        assert "".join(event.text for event in whole if isinstance(event, Content)) == text


def check_order(events: list[CallEvent]) -> None:
    """Calls are numbered, do not overlap, and the arguments of a complete one are an object."""
    num_begun, arguments = 0, None
    for event in events:
        if isinstance(event, CallBegin):
            assert arguments is None
            assert (event.index, bool(event.name)) == (num_begun, True)
            num_begun, arguments = num_begun + 1, ""
        elif isinstance(event, CallArguments):
            assert arguments is not None
            arguments += event.json
        elif isinstance(event, CallEnd):
            assert arguments is not None
            assert not event.is_complete or isinstance(json.loads(arguments), dict)
            arguments = None
        else:
            assert arguments is None
    assert arguments is None


@pytest.mark.parametrize(
    ("name", "opening"), [("hermes", "<tool_call>"), ("llama3_json", ""), ("mistral", "[TOOL_CALLS]")]
)
def test_no_nesting_is_too_deep(name: str, opening: str):
    key = "parameters" if name == "llama3_json" else "arguments"
    arguments = '{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"
    assert parsed(name, [f'{opening}{{"name": "f", "{key}": {arguments}}}']) == call(0, "f", arguments)


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(InvalidRequestError, match="tool_call_parser = 'nobody': must be one of hermes"):
        parser_for("nobody")
