"""Grammars of arguments in formats that write them one by one, not as one JSON object: Python calls and XML.

Such an argument follows the schema of its property. What only the schema of the whole object can say is refused here.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.router.schemas.normalizer import normalized
from holdfast.router.schemas.places import SchemaError
from holdfast.router.schemas.value_types import ValueTypes
from holdfast.router.tools.gemma_calls import QUOTE
from holdfast.router.tools.tools import Tool
from holdfast.router.tools.xml_calls import Markup, text_schema
from holdfast.worker.errors import InvalidRequestError

_JSON_STYLE: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
    "coerce_one_of": False,
}
"""JSON style that models were taught: one space or none. Any number of spaces lets a model emit blanks without end."""


class LarkRules:
    """Rules in the order in which they were added; the grammar begins at `start`."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        longest_first = sorted(token_ids, key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if token_ids else None
        self._rules: list[str] = []

    def add(self, name: str, body: str) -> str:
        """Returns the name."""
        self._rules.append(f"{name}: {body}")
        return name

    def text(self, text: str) -> str:
        """An expression for exactly this text."""
        pieces = self._tokens.split(text) if self._tokens else [text]
        written = [self._token(piece) or json.dumps(piece, ensure_ascii=False) for piece in pieces if piece]
        return " ".join(written) or '""'

    def free_text(self, name: str, end: str, banned: str = "") -> str:
        """A rule for any text up to the first `end`, which is part of it, and without `banned`. Returns its name."""
        before, token = self._at_token(end)
        ends = _without(end) if token else ""
        terminal = self.add(name.upper(), f"/(?s:.*){_escaped(before)}/{_without(banned)}{ends}")
        return self.add(name, f"{terminal} {token}") if token else self._lazy(name, terminal)

    def any_text(self, terminal: str, banned: str = "", *, not_first: str = "") -> str:
        """A terminal for any text without `banned`, or with one character at its start. Returns its name."""
        any_but = f"\\s*([^\\s{_escaped(not_first)}](?s:.*))?" if not_first else "(?s:.*)"
        return self.add(terminal, f"/{any_but}/{_without(banned)}")

    def bounded_text(self, name: str, end: str, lengths: str) -> str:
        """A rule for a text whose length is given as in `*` or `{1,3}`, up to the first `end`. Returns its name."""
        terminal, (before, token) = name.upper(), self._at_token(end)
        if token:
            return self.add(
                name, f"{self.add(terminal, f'/(?s:.{lengths}){_escaped(before)}/{_without(end)}')} {token}"
            )
        mark = end.strip()
        self.add(terminal, f"/(?s:.{lengths}){_escaped(end)}/ & ~/(?s:.*){_escaped(mark)}(?s:.)+/")
        return self._lazy(name, terminal)

    def json(self, name: str, schema: Mapping[str, Any]) -> str:
        """A rule for a value that matches a JSON schema. Returns its name. Its escapes mean the same in Python.

        Raises `SchemaError` for a schema that cannot be enforced.
        """
        found = normalized(dict(schema))
        style = {**_JSON_STYLE, "json_allowed_escapes": found.escapes}
        return self.add(name, f"%json {json.dumps({**found.schema, 'x-guidance': style}, ensure_ascii=False)}")

    def written(self) -> str:
        return "\n".join(self._rules) + "\n"

    def _lazy(self, name: str, terminal: str) -> str:
        """A rule that ends where the terminal matches for the first time."""
        self.add(f"{name}[lazy]", terminal)
        return name

    def _at_token(self, text: str) -> tuple[str, str]:
        """The text before the first part of it that is a single token, which no terminal can be, and an expression for
        the rest. A terminal matches greedily, so the text before belongs to it.
        """
        found = None if self._tokens is None else self._tokens.search(text)
        return (text, "") if found is None else (text[: found.start()], self.text(text[found.start() :]))

    def _token(self, text: str) -> str:
        return f"<[{self._token_ids[text]}]>" if text in self._token_ids else ""


def _escaped(text: str) -> str:
    """The text as a regex between slashes."""
    return re.escape(text).replace("\n", "n").replace("/", "\\/")


def _without(banned: str) -> str:
    return f" & ~/(?s:.*){_escaped(banned)}(?s:.*)/" if banned else ""


_NOTES: Final = {"title", "description", "$comment", "default", "examples", "deprecated", "$defs", "definitions"}
_KNOWN: Final = {"type", "properties", "required", "additionalProperties", "$schema", "$id", *_NOTES}
_PYTHON_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_XML_NAME: Final = re.compile(r"[^\s<>]([^\n<>]{0,254}[^\s<>])?")
_TEXT_KEYS: Final = {"type", "enum", "const", "minLength", "maxLength", *_NOTES}


class _Parameter(NamedTuple):
    name: str
    schema: Mapping[str, Any]
    is_required: bool


_Write: TypeAlias = Callable[[LarkRules, Tool, _Parameter, str], str]
"""Writes the expression of a value, given the prefix of its rules' names."""


def python_arguments(rules: LarkRules, tool: Tool, prefix: str) -> str:
    """The expression of the text between a call's brackets. Arguments have the order of the schema."""
    return _listed(rules, tool, prefix, "=", ", ", _python_value)


def gemma_arguments(rules: LarkRules, tool: Tool, prefix: str) -> str:
    """Like `python_arguments`, for the text between the brackets of a Gemma 4 object."""
    return _listed(rules, tool, prefix, ":", ",", _gemma_value)


def _listed(rules: LarkRules, tool: Tool, prefix: str, sign: str, comma: str, write: _Write) -> str:
    first = rest = rules.add(f"{prefix}_none", '""')
    for index, parameter in reversed(list(enumerate(_parameters(tool, _PYTHON_NAME)))):
        value = write(rules, tool, parameter, f"{prefix}_value_{index}")
        item = f"{rules.text(f'{parameter.name}{sign}')} {value} {rest}"
        without = ("", "") if parameter.is_required else (f" | {first}", f" | {rest}")
        first = rules.add(f"{prefix}_first_{index}", item + without[0])
        rest = rules.add(f"{prefix}_next_{index}", f"{rules.text(comma)} {item}{without[1]}")
    return first


def xml_parameters(rules: LarkRules, tool: Tool, prefix: str, markup: Markup) -> str:
    """The expression of the parameters of a call, in the order of the schema, each with a line break behind it."""
    items, types = [], ValueTypes(tool.parameters)
    for index, parameter in enumerate(_parameters(tool, _XML_NAME)):
        kind = "false" if text_schema(types, parameter.name) is None else "true"
        head = rules.text(f"{markup.before}{parameter.name}{markup.behind}".replace("{kind}", kind))
        value = _xml_value(rules, tool, types, parameter, f"{prefix}_value_{index}", markup.end)
        line_end = rules.text("\n")
        item = rules.add(f"{prefix}_parameter_{index}", f"{head} {value} {line_end}")
        items.append(item if parameter.is_required else f"{item}?")
    return " ".join(items)


def _parameters(tool: Tool, names: re.Pattern[str]) -> Iterator[_Parameter]:
    """Raises `InvalidRequestError` for a schema that its properties do not say all of."""
    schema = tool.parameters
    for key in sorted(schema.keys() - _KNOWN):
        limit = "is not possible here: the model's tool calls do not write their arguments as one JSON object"
        raise InvalidRequestError(f"{_field(tool)}.{key}", schema[key], limit)
    definitions = _definitions(schema)
    required, properties = schema.get("required", ()), schema.get("properties", {})
    unknown: dict[str, dict[str, Any]] = {name: {} for name in required if name not in properties}
    if unknown and schema.get("additionalProperties", True) is not True:
        raise InvalidRequestError(f"{_field(tool)}.required", sorted(unknown), "must be properties")
    for name, described in {**properties, **unknown}.items():
        if not names.fullmatch(name):
            limit = "the model's tool calls cannot write such a name"
            raise InvalidRequestError(f"{_field(tool)}.properties", name, limit)
        if described is not False:
            own = described if isinstance(described, Mapping) else {}
            yield _Parameter(name, {**definitions, **own}, name in required)


def _python_value(rules: LarkRules, tool: Tool, parameter: _Parameter, name: str) -> str:
    """JSON, but for flags, which models write as Python does."""
    is_flag = parameter.schema.get("type") == "boolean" and not parameter.schema.keys() & {"enum", "const"}
    return '("True" | "False")' if is_flag else _json_value(rules, tool, parameter, name)


def _gemma_value(rules: LarkRules, tool: Tool, parameter: _Parameter, name: str) -> str:
    """Text between marks, lists and objects of such values, and other values as JSON writes them."""
    types = ValueTypes({"properties": {parameter.name: parameter.schema}, **_definitions(parameter.schema)})
    found = types.followed(types.of_property(parameter.name))
    schema = found if isinstance(found, Mapping) else {}
    kinds = ["string"] if text_schema(types, parameter.name) else schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not kinds or len(name) > _MAX_NESTED:
        limit = "must have a type, and at most a few levels: the model's tool calls do not write it as JSON"
        raise InvalidRequestError(_place(tool, parameter), tool.name, limit)
    whole = _Parameter(parameter.name, {**_definitions(parameter.schema), **schema}, parameter.is_required)
    written = [_NESTED[kind](rules, tool, whole, f"{name}_{kind}") for kind in _NESTED if kind in kinds]
    if plain := [kind for kind in kinds if kind not in _NESTED]:
        own = _Parameter(whole.name, {**whole.schema, "type": plain}, True)
        written.append(_json_value(rules, tool, own, f"{name}_plain"))
    return f"({' | '.join(written)})"


def _gemma_object(rules: LarkRules, tool: Tool, parameter: _Parameter, name: str) -> str:
    inner = Tool(name=tool.name, parameters=parameter.schema, field=_place(tool, parameter))
    return f"{rules.text('{')} {gemma_arguments(rules, inner, name)} {rules.text('}')}"


def _gemma_list(rules: LarkRules, tool: Tool, parameter: _Parameter, name: str) -> str:
    schema = parameter.schema
    for key in sorted(schema.keys() - {"type", "items", "minItems", "maxItems", *_NOTES}):
        limit = "is not possible here: the model's tool calls do not write lists as JSON"
        raise InvalidRequestError(f"{_place(tool, parameter)}.{key}", schema[key], limit)
    items = schema.get("items", {})
    own = {**_definitions(schema), **(items if isinstance(items, Mapping) else {})}
    inner = Tool(name=tool.name, field=_place(tool, parameter))
    item = rules.add(f"{name}_item", _gemma_value(rules, inner, _Parameter("items", own, True), f"{name}_of"))
    fewest, most = schema.get("minItems", 0), schema.get("maxItems")
    more = f"({rules.text(',')} {item}){{{max(0, fewest - 1)},{'' if most is None else max(0, most - 1)}}}"
    listed = f"{item} {more}" if most != 0 else '""'
    return f"{rules.text('[')} {listed if fewest else f'({listed})?'} {rules.text(']')}"


def _gemma_text(rules: LarkRules, tool: Tool, parameter: _Parameter, name: str) -> str:
    schema = _plain_text(tool, parameter, {**parameter.schema, "type": "string"})
    shortest, longest, quote = schema.get("minLength", 0), schema.get("maxLength"), rules.text(QUOTE)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        length = f"{{{shortest},{'' if longest is None else longest}}}" if shortest or longest is not None else "*"
        return f"{quote} {rules.bounded_text(name, QUOTE, length)}"
    fitting = [text for text in values if isinstance(text, str) and QUOTE not in text]
    if not fitting:
        limit = "must have a text that can stand in a tool call"
        raise InvalidRequestError(f"{_place(tool, parameter)}.enum", values, limit)
    return f"{quote} ({' | '.join(map(rules.text, fitting))}) {quote}"


_NESTED: Final[Mapping[str, _Write]] = {"string": _gemma_text, "array": _gemma_list, "object": _gemma_object}
_MAX_NESTED: Final = 160
"""Characters of a rule's name, which grows by some for each level."""


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _place(tool: Tool, parameter: _Parameter) -> str:
    return f"{_field(tool)}.properties.{parameter.name}"


def _json_value(rules: LarkRules, tool: Tool, parameter: _Parameter, name: str) -> str:
    try:
        return rules.json(name, parameter.schema)
    except SchemaError as error:
        field = f"{_field(tool)}.properties.{parameter.name}"
        raise InvalidRequestError(field, tool.name, error.reason) from None


def _xml_value(rules: LarkRules, tool: Tool, types: ValueTypes, parameter: _Parameter, name: str, end: str) -> str:
    """The expression of a value and its end."""
    schema = text_schema(types, parameter.name)
    if schema is None:
        return f"{_json_value(rules, tool, parameter, name)} {rules.text(end)}"
    schema = _plain_text(tool, parameter, schema)
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        is_free = not shortest and longest is None
        return rules.bounded_text(name, end, "*" if is_free else f"{{{shortest},{'' if longest is None else longest}}}")
    fitting = [text for text in values if _can_be_text(text, end) and shortest <= len(text) <= (longest or len(text))]
    if not fitting:
        limit = "must have a text that fits, and can stand in a tool call"
        raise InvalidRequestError(f"{_field(tool)}.properties.{parameter.name}.enum", values, limit)
    return f"({' | '.join(map(rules.text, fitting))}) {rules.text(end)}"


def _plain_text(tool: Tool, parameter: _Parameter, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a text, normalized. Raises `InvalidRequestError` for what only a grammar of JSON strings says."""
    field = f"{_field(tool)}.properties.{parameter.name}"
    own = {key: value for key, value in schema.items() if key not in _NOTES}
    try:
        plain = normalized({**own, "type": "string"}).schema
    except SchemaError as error:
        raise InvalidRequestError(field, tool.name, error.reason) from None
    for key in sorted(plain.keys() - _TEXT_KEYS):
        named = key if key in schema else "format"
        limit = "is not possible for text: the model's tool calls do not write it as a JSON string"
        raise InvalidRequestError(f"{field}.{named}", schema[named], limit)
    return plain


def _can_be_text(value: object, end: str) -> bool:
    return isinstance(value, str) and end.strip() not in value


def _field(tool: Tool) -> str:
    return f"{tool.field}.parameters"
