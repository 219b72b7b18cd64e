"""Tool calls in the XML style of Qwen3-Coder, whose arguments have no types: a tool's schema says what is text.

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from holdfast.router.schemas.value_types import STRING, ValueTypes, kind_of
from holdfast.router.tools.call_events import MAX_NAME, Malformed, Reading
from holdfast.router.tools.call_parser import ToolCallParser
from holdfast.router.tools.json_reader import ignore, pass_space, written
from holdfast.router.tools.tools import Tool

_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


class XmlCallParser(ToolCallParser):
    """Text streams as it comes; values of other types are held until they are whole."""

    MARKERS = ("<tool_call>", "<function=")
    CLOSINGS = ("</parameter>", "</function>", "</tool_call>")
    IN_THOUGHTS = "<tool_call>\n<function="

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}
        super().__init__()

    def _read_calls(self, opening: str) -> Reading[None]:
        if opening == self.MARKERS[0]:
            yield from pass_space(self._source, ignore)
            yield from self._source.expect("<function=")
        name = (yield from self._source.take_until(">", MAX_NAME)).strip()
        if not name:
            raise Malformed
        self._begin(name)
        self._pass_arguments("{")
        yield from self._read_parameters(name)
        self._pass_arguments("}")
        self._end()
        yield from pass_space(self._source, ignore)
        yield from self._source.pass_over("</tool_call>")

    def _read_parameters(self, name: str) -> Reading[None]:
        tool = self._tools.get(name)
        types = ValueTypes({} if tool is None else tool.parameters)
        separator = ""
        while True:
            yield from pass_space(self._source, ignore)
            if (yield from self._source.take("</function>")):
                return
            yield from self._source.expect("<parameter=")
            key = (yield from self._source.take_until(">", MAX_NAME)).strip()
            self._pass_arguments(f"{separator}{written(key)}: ")
            yield from self._read_value(types, key)
            separator = ", "

    def _read_value(self, types: ValueTypes, key: str) -> Reading[None]:
        """A line break stands at the start and at the end of the value, and is no part of it."""
        yield from self._source.take("\n")
        if text_schema(types, key) is None:
            schema = types.of_property(key)
            value = yield from self._source.take_until("</parameter>")
            return self._pass_arguments(_as_json(value, types.followed(schema), types.of(schema)))
        self._pass_arguments('"')
        text = _WithoutLastBreak(self)
        yield from self._source.pass_until("</parameter>", text.push)
        self._pass_arguments('"')


class _WithoutLastBreak:
    """Passes text on as the inside of a JSON string, without the line break that it ends in."""

    def __init__(self, parser: XmlCallParser) -> None:
        self._parser = parser
        self._held = ""

    def push(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._parser._pass_arguments(written(text.removesuffix("\n"))[1:-1])


def text_schema(types: ValueTypes, parameter: str) -> Mapping[str, Any] | None:
    """The schema of a value that stands in the output as it is; None for one that stands there as JSON."""
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
        return written(text.removesuffix("\n"))
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    is_listed_text = isinstance(values, list) and stripped in values and value not in values
    if STRING in kinds and (kind_of(value) not in kinds or is_listed_text):
        return written(text.removesuffix("\n"))
    return word


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
