"""Tools and tool choice of a chat request, as plain data, and their checks."""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.value_types import Neutral, check_names, check_neutral, is_flag, is_list, is_text

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")

_WISHES: Final[Neutral] = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
    "async": (False,),
    "output_schema": (),
}
"""Fields of vendors' tools that are not supported, with their neutral values."""

TOOL_NOTES: Final = frozenset(("cache_control", "eager_input_streaming"))
"""Fields of tools that no answer depends on: a mark of the prompt's cache, and when arguments are streamed."""

_PARTS: Final = ("name", "parameters", "description", "strict")
_RETURN: Final = "return"

Mode: TypeAlias = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """JSON schema of the arguments, an object; empty: any."""
    is_strict: bool = False
    """Whether calls must match the schema, rather than may."""
    field: str = dataclasses.field(default="tools", compare=False)
    """Field of its request."""
    returned: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    """The `return` of transformers' `get_json_schema`: the schema of the result, which templates may show."""

    def for_template(self) -> dict[str, Any]:
        """The tool in the form that chat templates read."""
        said = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        function = said if self.returned is None else {**said, _RETURN: dict(self.returned)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls tools: `none`, as it likes (`auto`), one or more (`required`), or the one named."""

    mode: Mode
    name: str = ""
    """Set for `named` only."""


def checked_tools(value: object, field: str = "tools") -> tuple[Tool, ...]:
    """The tools of a chat request in OpenAI's shape; None if there are no tools. Raises `InvalidRequestError`, naming
    the field.
    """
    if value is None:
        return ()
    if not is_list(value):
        raise InvalidRequestError(field, value, "must be a list of tools")
    tools = tuple(_from_openai(item, f"{field}[{index}]") for index, item in enumerate(value))
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise InvalidRequestError(f"{field}[{index}].function.name", tool.name, "must differ from the other tools'")
        seen.add(tool.name)
    return tools


def checked_tool(
    field: str, name: object, parameters: object = None, description: object = None, is_strict: object = None
) -> Tool:
    """A tool of any shape, from its parts. `field` is where they stand; None stands for a missing argument."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(f"{field}.name", name, "must be 1 to 64 letters, digits, underscores or hyphens")
    if description is not None and not is_text(description):
        raise InvalidRequestError(f"{field}.description", description, "must be text")
    if is_strict is not None and not is_flag(is_strict):
        raise InvalidRequestError(f"{field}.strict", is_strict, "must be true or false")
    schema = _checked_schema(f"{field}.parameters", {} if parameters is None else parameters)
    return Tool(name=name, description=description or "", parameters=schema, is_strict=bool(is_strict), field=field)


def checked_tool_choice(value: object, tools: Sequence[Tool], field: str = "tool_choice") -> ToolChoice:
    """Tool choice in OpenAI's shape; None is `auto` with tools, and `none` without. Raises `InvalidRequestError`."""
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if value == "none":
        return ToolChoice("none")
    if isinstance(value, str) and value not in ("auto", "required"):
        raise InvalidRequestError(field, value, "must be none, auto, required, or an object that names a function")
    if not tools:
        raise InvalidRequestError(field, value, "is possible only with tools")
    if isinstance(value, str):
        return ToolChoice("auto" if value == "auto" else "required")
    name = _chosen_name(value, field)
    if not isinstance(name, str) or name not in {tool.name for tool in tools}:
        names = ", ".join(tool.name for tool in tools)
        raise InvalidRequestError(f"{field}.function.name", name, f"must be one of the tools: {names}")
    return ToolChoice("named", name)


def _chosen_name(value: object, field: str) -> object:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(field, value, "must be none, auto, required, or an object that names a function")
    if value.get("type", "function") != "function":
        raise InvalidRequestError(f"{field}.type", value["type"], "must be function")
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{field}.function", function, "must be an object with a name")
    check_names(value, ("type", "function"), field)
    check_names(function, ("name",), f"{field}.function")
    return function.get("name")


def check_tool_names(tool: Mapping[str, Any], known: Collection[str], field: str) -> None:
    """Raises `InvalidRequestError` for unsupported or unknown fields of a vendor's tool."""
    for name, values in _WISHES.items():
        if tool.get(name) is not None:
            check_neutral(name, tool[name], values, f"{field}.")
    check_names(tool, known, field, TOOL_NOTES | _WISHES.keys())


def _from_openai(item: object, field: str) -> Tool:
    if not isinstance(item, Mapping):
        raise InvalidRequestError(field, item, "must be an object with type and function")
    if item.get("type", "function") != "function":
        raise InvalidRequestError(f"{field}.type", item["type"], "must be function")
    function = item.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{field}.function", function, "must be an object with a name")
    check_names(item, ("type", "function"), field, TOOL_NOTES)
    check_names(function, (*_PARTS, _RETURN), f"{field}.function", TOOL_NOTES)
    tool = checked_tool(f"{field}.function", *map(function.get, _PARTS))
    if (returned := function.get(_RETURN)) is None:
        return tool
    if not isinstance(returned, Mapping):
        raise InvalidRequestError(f"{field}.function.{_RETURN}", returned, "must be a JSON schema")
    return dataclasses.replace(tool, returned=returned)


def _checked_schema(field: str, schema: object) -> Mapping[str, Any]:
    """The schema after a quick check. Compiling a grammar finds the rest, where one is needed."""
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(field, schema, "must be a JSON schema of an object")
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(f"{field}.type", schema["type"], "must be object")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not all(isinstance(item, Mapping | bool) for item in properties.values()):
        raise InvalidRequestError(f"{field}.properties", properties, "must be an object of JSON schemas")
    if not is_list(required) or not all(isinstance(name, str) for name in required):
        raise InvalidRequestError(f"{field}.required", required, "must be a list of names")
    try:
        json.dumps(schema, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(field, schema, f"must be a JSON schema: {error}") from None
    return schema
