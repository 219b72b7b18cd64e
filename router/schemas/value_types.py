"""Types that a value may have under a JSON schema, however the schema says it: by `type`, constants, references,
combinations.

For formats that write values without quotation marks.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from holdfast.router.schemas.places import References, list_of
from holdfast.router.schemas.satisfiability import types_of

INTEGER, FRACTION, STRING, NULL, BOOLEAN = "integer", "fraction", "string", "null", "boolean"
ALL_KINDS: Final = frozenset({INTEGER, FRACTION, STRING, NULL, BOOLEAN, "array", "object"})
"""Kinds of values: a number is an integer or a fraction."""

_MAX_STEPS: Final = 32
_PLAIN: Final = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "$defs", "definitions"}
)


def kind_of(value: Any) -> str:
    """Kind of a JSON value."""
    if isinstance(value, bool):
        return BOOLEAN
    if isinstance(value, int | float):
        return INTEGER if value == value // 1 else FRACTION
    kinds = ((str, STRING), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), NULL)


class ValueTypes:
    """Types of the values of one document's schemas."""

    def __init__(self, root: Any) -> None:
        self._references = References(root)
        self._root = root
        self._known: dict[int, frozenset[str]] = {}

    def of(self, schema: Any) -> frozenset[str]:
        """The kinds of values that may match, as far as types and constants tell."""
        if not isinstance(schema, Mapping):
            return frozenset() if schema is False else ALL_KINDS
        if id(schema) not in self._known:
            self._known[id(schema)] = ALL_KINDS  # a schema within itself says nothing more
            self._known[id(schema)] = self._of(schema)
        return self._known[id(schema)]

    def of_property(self, name: str) -> Any:
        """The schema of a property of the root, wherever the root has it; None without a type."""
        found = [item for part in self._parts(self._root) if (item := _property(part, name)) is not None]
        return {"anyOf": found} if len(found) > 1 else found[0] if found else None

    def followed(self, schema: Any) -> Any:
        """Final target of a schema that is nothing but a reference, or has one schema in `allOf`."""
        for _ in range(_MAX_STEPS):
            keys = schema.keys() - _PLAIN if isinstance(schema, Mapping) else None
            if keys == {"$ref"}:
                schema = self._target(schema)
            elif keys == {"allOf"} and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
                schema = schema["allOf"][0]
            else:
                break
        return schema

    def _of(self, schema: Mapping[str, Any]) -> frozenset[str]:
        kinds = frozenset(kind for name in types_of(schema) for kind in _kinds_of_type(name))
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            kinds &= frozenset(map(kind_of, values))
        for item in list_of(schema, "allOf"):
            kinds &= self.of(item)
        for keyword in ("anyOf", "oneOf"):
            if options := list_of(schema, keyword):
                kinds &= frozenset().union(*map(self.of, options))
        return kinds & self.of(self._target(schema)) if "$ref" in schema else kinds

    def _parts(self, root: Any) -> Iterator[Mapping[str, Any]]:
        """The root and its parts."""
        open_parts, seen = [root], set[int]()
        while open_parts:
            part = open_parts.pop()
            if not isinstance(part, Mapping) or id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            open_parts += [item for keyword in ("allOf", "anyOf", "oneOf") for item in list_of(part, keyword)]
            if "$ref" in part:
                open_parts.append(self._target(part))

    def _target(self, schema: Mapping[str, Any]) -> Any:
        try:
            return self._references.target(schema)
        except (LookupError, ValueError, TypeError):
            return True


def _kinds_of_type(name: str) -> tuple[str, ...]:
    return (INTEGER, FRACTION) if name == "number" else (name,)


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties, rest = schema.get("properties"), schema.get("additionalProperties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return rest if isinstance(rest, Mapping) and "properties" in schema else None
