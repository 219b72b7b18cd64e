"""Tool calls in the styles of XML: those of Qwen3-Coder, MiniMax-M2 and GLM, whose arguments have no types, so that a
tool's schema says what is text; and DSML of DeepSeek V3.2 and V4, which says it itself.

    <tool_call>                           <minimax:tool_call>
    <function=get_weather>                <invoke name="get_weather">
    <parameter=city>                      <parameter name="city">Paris</parameter>
    Paris                                 </invoke>
    </parameter>                          </minimax:tool_call>
    </function>
    </tool_call>                          <｜DSML｜function_calls>
                                          <｜DSML｜invoke name="get_weather">
    <tool_call>get_weather                <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <arg_key>city</arg_key>               </｜DSML｜invoke>
    <arg_value>Paris</arg_value>          </｜DSML｜function_calls>
    </tool_call>
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, NamedTuple

from holdfast.router.schemas.value_types import STRING, ValueTypes, kind_of
from holdfast.router.tools.call_events import MAX_NAME, Malformed, Reading
from holdfast.router.tools.call_parser import ToolCallParser
from holdfast.router.tools.json_reader import ignore, pass_space, written
from holdfast.router.tools.tools import Tool

DSML: Final = "｜DSML｜"
"""Stands in each tag of DeepSeek's calls."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


class Markup(NamedTuple):
    """Texts of one style, of a call or of a parameter: before its name, behind it, and at the end. In grammars `{kind}`
    stands for whether a parameter's value is text.
    """

    before: str
    behind: str
    end: str


class XmlCallParser(ToolCallParser):
    """Calls of Qwen3-Coder. Text streams as it comes; values of other types are held until they are whole."""

    MARKERS: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    CLOSINGS: ClassVar[tuple[str, ...]] = ("</parameter>", "</function>", "</tool_call>")
    IN_THOUGHTS: ClassVar[str] = "<tool_call>\n<function="

    CALL: ClassVar[Markup] = Markup("<function=", ">", "</function>")
    PARAMETER: ClassVar[Markup] = Markup("<parameter=", ">", "</parameter>")
    BLOCK_ENDS: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    BREAK: ClassVar[str] = "\n"
    """Text at the start and at the end of a value that is no part of it."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}
        super().__init__()

    def _read_calls(self, opening: str) -> Reading[None]:
        name = yield from self._read_name(opening)
        self._begin(name)
        self._pass_arguments("{")
        yield from self._read_parameters(name)
        self._pass_arguments("}")
        self._end()
        for end in self.BLOCK_ENDS:
            yield from pass_space(self._source, ignore)
            yield from self._source.pass_over(end)

    def _read_name(self, opening: str) -> Reading[str]:
        if opening != self.CALL.before:
            yield from pass_space(self._source, ignore)
            yield from self._source.expect(self.CALL.before)
        name = (yield from self._source.take_until(self.CALL.behind, MAX_NAME)).strip()
        if not name:
            raise Malformed
        return name

    def _read_parameters(self, name: str) -> Reading[None]:
        tool = self._tools.get(name)
        types = ValueTypes({} if tool is None else tool.parameters)
        separator = ""
        while True:
            yield from pass_space(self._source, ignore)
            if (yield from self._source.take(self.CALL.end)):
                return
            yield from self._source.expect(self.PARAMETER.before)
            key = (yield from self._source.take_until(self.PARAMETER.behind, MAX_NAME)).strip()
            is_text = yield from self._read_kind(types, key)
            self._pass_arguments(f"{separator}{written(key)}: ")
            yield from self._read_value(types, key, is_text)
            separator = ", "

    def _read_kind(self, types: ValueTypes, key: str) -> Reading[bool]:
        """Reads up to a parameter's value; whether that is text."""
        yield from self._source.take(self.BREAK)
        return text_schema(types, key) is not None

    def _read_value(self, types: ValueTypes, key: str, is_text: bool) -> Reading[None]:
        if not is_text:
            schema = types.of_property(key)
            value = yield from self._source.take_until(self.PARAMETER.end)
            value = value.removesuffix(self.BREAK)
            return self._pass_arguments(_as_json(value, types.followed(schema), types.of(schema)))
        self._pass_arguments('"')
        text = _WithoutLastBreak(self)
        yield from self._source.pass_until(self.PARAMETER.end, text.push)
        self._pass_arguments('"')


class MiniMaxCallParser(XmlCallParser):
    """Calls of MiniMax-M2, of which several may stand in one block."""

    MARKERS = ("<minimax:tool_call>", '<invoke name="')
    CLOSINGS = ("</parameter>", "</invoke>", "</minimax:tool_call>")
    IN_THOUGHTS = '<minimax:tool_call>\n<invoke name="'
    CALL = Markup('<invoke name="', '">', "</invoke>")
    PARAMETER = Markup('<parameter name="', '">', "</parameter>")
    BLOCK_ENDS = ("</minimax:tool_call>",)
    BREAK = ""


class GlmCallParser(XmlCallParser):
    """Calls of GLM-4.5 and later, with line breaks between tags or without."""

    MARKERS = ("<tool_call>",)
    CLOSINGS = ("</arg_key>", "</arg_value>", "</tool_call>")
    IN_THOUGHTS = ""
    CALL = Markup("<tool_call>", "", "</tool_call>")
    PARAMETER = Markup("<arg_key>", "</arg_key>", "</arg_value>")
    BLOCK_ENDS = ()
    BREAK = ""

    def _read_name(self, opening: str) -> Reading[str]:
        yield from pass_space(self._source, ignore)
        name = yield from self._source.take_all(_NAME)
        yield from pass_space(self._source, ignore)
        if not name or len(name) > MAX_NAME or (yield from self._source.peek()) != "<":
            raise Malformed
        follows = self.CALL.end
        if not (yield from self._source.take(follows)):
            follows = self.PARAMETER.before
            yield from self._source.expect(follows)
        self._source.position -= len(follows)  # unsettled text can be read again
        return name

    def _read_kind(self, types: ValueTypes, key: str) -> Reading[bool]:
        yield from pass_space(self._source, ignore)
        yield from self._source.expect("<arg_value>")
        return text_schema(types, key) is not None


class DsmlCallParser(XmlCallParser):
    """Calls of DeepSeek V3.2 and V4. A value that is no text is JSON."""

    MARKERS = (f"<{DSML}function_calls>", f"<{DSML}tool_calls>", f'<{DSML}invoke name="')
    CLOSINGS = (f"</{DSML}parameter>", f"</{DSML}invoke>", f"</{DSML}function_calls>", f"</{DSML}tool_calls>")
    IN_THOUGHTS = ""
    CALL = Markup(f'<{DSML}invoke name="', '">', f"</{DSML}invoke>")
    PARAMETER = Markup(f'<{DSML}parameter name="', '" string="', f"</{DSML}parameter>")
    BLOCK_ENDS = CLOSINGS[2:]
    BREAK = ""

    def _read_kind(self, types: ValueTypes, key: str) -> Reading[bool]:
        kind = yield from self._source.take_until('">', len("false"))
        if kind not in ("true", "false"):
            raise Malformed
        return kind == "true"


class _WithoutLastBreak:
    """Passes text on as the inside of a JSON string, without the line break that it ends in."""

    def __init__(self, parser: XmlCallParser) -> None:
        self._parser = parser
        self._break = parser.BREAK
        self._held = ""

    def push(self, text: str) -> None:
        text = self._held + text
        self._held = self._break if self._break and text.endswith(self._break) else ""
        self._parser._pass_arguments(written(text.removesuffix(self._held))[1:-1])


def text_schema(types: ValueTypes, parameter: str) -> Mapping[str, Any] | None:
    """The schema of a value that is written in the output as plain text; None for one written as JSON."""
    schema = types.followed(types.of_property(parameter))
    if schema is None:
        return {}
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    are_texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return schema if schema.get("type", "string" if are_texts else None) == "string" else None


def _as_json(text: str, schema: Any, kinds: frozenset[str]) -> str:
    """A value that is no JSON, or JSON of another type than a schema that allows texts has, is taken as text."""
    stripped = text.strip()
    word = _PYTHON_WORDS.get(stripped, stripped)
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return written(text)
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    is_listed_text = isinstance(values, list) and stripped in values and value not in values
    if STRING in kinds and (kind_of(value) not in kinds or is_listed_text):
        return written(text)
    return word


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
