"""Finite values: which schemas have any, so that an output that follows them can come to an end.

A schema that requires itself, such as a list node whose `next` is required and is another node, has no finite value.
Where something else may stand in its place it is taken out; a whole schema without one is refused.
"""

from collections.abc import Mapping
from typing import Any, Final

from holdfast.router.schemas.places import References, children
from holdfast.router.schemas.schema_error import SchemaError

ALL_TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
_MAX_ROUNDS: Final = 64
"""Looks at all schemas, each for what the one before found. What is written by hand takes two or three."""


class FiniteValues:
    """Of a schema document, as it is when this is made, which raises `SchemaError` for one that is too entangled."""

    def __init__(self, root: Any, references: References) -> None:
        self._references = references
        self._finite: set[int] = set()
        nodes = self._reached(root)
        self._known = set(map(id, nodes))
        for _ in range(_MAX_ROUNDS):
            num_before = len(self._finite)
            for node in nodes:
                if id(node) not in self._finite and self._has_one(node):
                    self._finite.add(id(node))
            if len(self._finite) in (num_before, len(nodes)):
                return
        raise SchemaError("$ref", None, "cannot be enforced: the references are chained too deeply")

    def __contains__(self, schema: Any) -> bool:
        """Whether a schema has a finite value, as far as recursion goes."""
        if not isinstance(schema, dict):
            return schema is not False
        return id(schema) in self._finite or id(schema) not in self._known

    def _reached(self, root: Any) -> list[dict[str, Any]]:
        """All schemas that are applied, the innermost first."""
        found: dict[int, dict[str, Any]] = {}
        open_nodes = [root]
        while open_nodes:
            node = open_nodes.pop()
            if not isinstance(node, dict) or id(node) in found:
                continue
            found[id(node)] = node
            open_nodes += [child.schema for child in children(node)]
            if "$ref" in node:
                open_nodes.append(self._target(node))
        return list(found.values())[::-1]

    def culprit(self, schema: Mapping[str, Any]) -> str:
        """The keyword by which a schema has no finite value."""
        if "$ref" in schema and self._target(schema) not in self:
            return "$ref"
        if not all(item in self for item in _list(schema, "allOf")):
            return "allOf"
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema and not any(item in self for item in _list(schema, keyword)):
                return keyword
        names = types_of(schema)
        return (
            "required" if "object" in names and schema.get("required") else "minItems" if "array" in names else "type"
        )

    def _has_one(self, schema: Mapping[str, Any]) -> bool:
        if "$ref" in schema and self._target(schema) not in self:
            return False
        if not all(item in self for item in _list(schema, "allOf")):
            return False
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema and not any(item in self for item in _list(schema, keyword)):
                return False
        if "const" in schema or "enum" in schema:
            return True
        return any(self._has_one_of_type(schema, name) for name in types_of(schema))

    def _has_one_of_type(self, schema: Mapping[str, Any], name: str) -> bool:
        if name == "object":
            properties, rest = _map(schema, "properties"), schema.get("additionalProperties", True)
            required = _list(schema, "required")
            if not required and schema.get("minProperties", 0):
                return rest in self or any(item in self for item in properties.values()) or not properties
            return all(properties.get(item, rest) in self or "patternProperties" in schema for item in required)
        if name == "array":
            first, rest = array_items(schema)
            count = schema.get("minItems", 0)
            needed = first[: int(count)] if isinstance(count, int | float) else []
            return all(item in self for item in needed) and (len(first) >= count or rest in self)
        return True

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """What cannot be found is refused elsewhere."""
        try:
            return self._references.target(dict(schema) if not isinstance(schema, dict) else schema)
        except (LookupError, ValueError, TypeError):
            return True


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that `type` names; all where it is not there."""
    named = schema.get("type", ALL_TYPES)
    return (named,) if isinstance(named, str) else tuple(map(str, named)) if isinstance(named, list | tuple) else ()


def array_items(schema: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The schemas of the first items, and that of the others, as any draft writes them."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return _list(schema, "prefixItems"), items


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _map(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    found = schema.get(keyword)
    return found if isinstance(found, dict) else {}
