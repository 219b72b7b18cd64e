"""Tool calls as models write them in each format, and as a parser tells of them."""

from collections.abc import Sequence

from holdfast.router.tools.call_events import CallArguments, CallBegin, CallEnd, CallEvent, merged
from holdfast.router.tools.chat_style import parser_for
from holdfast.router.tools.tools import checked_tools

STRING, INTEGER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TOOLS = checked_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"s": STRING, "n": INTEGER, "b": BOOLEAN}},
            },
        }
    ]
)
HERMES = '<tool_call>\n{"name": "f", "arguments": {"s": "a\\"}", "n": [1, 2.5e3, {}]}}\n</tool_call>'
MISTRAL = '[TOOL_CALLS][{"name": "f", "arguments": {"s": "x"}}, {"arguments": {"n": 1}, "name": "g"}]'
XML = (
    '<tool_call>\n<function=f>\n<parameter=s>\none\ntwo "2"\n</parameter>\n<parameter=n>\n3\n</parameter>\n'
    "<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
PYTHONIC = """[f(s="a\\n'\\u00e9", n=[1, (2,), -3.5], b=True, d={'k': None}), g()]"""
DEEPSEEK_V3 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "x"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)

GLM = (
    '<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>one\ntwo "2"</arg_value>\n'
    "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">é\n{</parameter>\n<parameter name="b">'
    'true</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>'
)
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">'
    '12</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">{"a": [1, null]}</｜DSML｜parameter>'
    '\n</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
KIMI = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "x", "n": 1}'
    "<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)


def parsed(name: str, pieces: Sequence[str]) -> list[CallEvent]:
    parser = parser_for(name, TOOLS)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish()])


def call(index: int, name: str, arguments: str) -> list[CallEvent]:
    return [CallBegin(index, name), CallArguments(index, arguments), CallEnd(index)]
