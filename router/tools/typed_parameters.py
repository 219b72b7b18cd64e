"""Grammars of arguments in formats that write them one by one, not as one JSON object: Python calls and XML.

Such an argument follows the schema of its property. What only the schema of the whole object can say is refused here.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from holdfast.router.schemas.normalizer import normalized
from holdfast.router.schemas.schema_error import SchemaError
from holdfast.router.schemas.value_types import ValueTypes
from holdfast.router.tools.lark_rules import LarkRules
from holdfast.router.tools.tools import Tool
from holdfast.router.tools.xml_calls import text_schema
from holdfast.worker.errors import InvalidRequestError

_NOTES: Final = {"title", "description", "$comment", "default", "examples", "deprecated", "$defs", "definitions"}
_KNOWN: Final = {"type", "properties", "required", "additionalProperties", "$schema", "$id", *_NOTES}
_PYTHON_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_XML_NAME: Final = re.compile(r"[^\s<>]([^\n<>]{0,254}[^\s<>])?")
_TEXT_KEYS: Final = {"type", "enum", "const", "minLength", "maxLength", *_NOTES}
_END: Final = "\n</parameter>"


class _Parameter(NamedTuple):
    name: str
    schema: Mapping[str, Any]
    is_required: bool


def python_arguments(rules: LarkRules, tool: Tool, prefix: str) -> str:
    """The expression of what stands between the brackets of a call. Arguments have the order of the schema."""
    first = rest = rules.add(f"{prefix}_none", '""')
    for index, parameter in reversed(list(enumerate(_parameters(tool, _PYTHON_NAME)))):
        value = _python_value(rules, tool, parameter, f"{prefix}_value_{index}")
        item = f"{rules.text(f'{parameter.name}=')} {value} {rest}"
        without = ("", "") if parameter.is_required else (f" | {first}", f" | {rest}")
        first = rules.add(f"{prefix}_first_{index}", item + without[0])
        rest = rules.add(f"{prefix}_next_{index}", f"{rules.text(', ')} {item}{without[1]}")
    return first


def xml_parameters(rules: LarkRules, tool: Tool, prefix: str) -> str:
    """The expression of the parameters of a call, in the order of the schema."""
    items, types = [], ValueTypes(tool.parameters)
    for index, parameter in enumerate(_parameters(tool, _XML_NAME)):
        head = rules.text(f"<parameter={parameter.name}>\n")
        value = _xml_value(rules, tool, types, parameter, f"{prefix}_value_{index}")
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
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
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


def _json_value(rules: LarkRules, tool: Tool, parameter: _Parameter, name: str) -> str:
    try:
        return rules.json(name, parameter.schema)
    except SchemaError as error:
        field = f"{_field(tool)}.properties.{parameter.name}"
        raise InvalidRequestError(field, tool.name, error.told) from None


def _xml_value(rules: LarkRules, tool: Tool, types: ValueTypes, parameter: _Parameter, name: str) -> str:
    """The expression of a value and of what ends it."""
    schema = text_schema(types, parameter.name)
    if schema is None:
        return f"{_json_value(rules, tool, parameter, name)} {rules.text(_END)}"
    schema = _plain_text(tool, parameter, schema)
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        is_free = not shortest and longest is None
        return rules.bounded_text(
            name, _END, "*" if is_free else f"{{{shortest},{'' if longest is None else longest}}}"
        )
    fitting = [text for text in values if _can_be_text(text) and shortest <= len(text) <= (longest or len(text))]
    if not fitting:
        limit = "must have a text that fits, and can stand in a tool call"
        raise InvalidRequestError(f"{_field(tool)}.properties.{parameter.name}.enum", values, limit)
    return f"({' | '.join(map(rules.text, fitting))}) {rules.text(_END)}"


def _plain_text(tool: Tool, parameter: _Parameter, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a text, normalized. Raises `InvalidRequestError` for what only a grammar of JSON strings says."""
    field = f"{_field(tool)}.properties.{parameter.name}"
    own = {key: value for key, value in schema.items() if key not in _NOTES}
    try:
        plain = normalized({**own, "type": "string"}).schema
    except SchemaError as error:
        raise InvalidRequestError(field, tool.name, error.told) from None
    for key in sorted(plain.keys() - _TEXT_KEYS):
        named = key if key in schema else "format"
        limit = "is not possible for text: the model's tool calls do not write it as a JSON string"
        raise InvalidRequestError(f"{field}.{named}", schema[named], limit)
    return plain


def _can_be_text(value: object) -> bool:
    return isinstance(value, str) and _END.strip() not in value


def _field(tool: Tool) -> str:
    return f"{tool.field}.parameters"
