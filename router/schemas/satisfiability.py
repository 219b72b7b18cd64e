"""Finite values: which schemas have any, so that an output that follows them can come to an end.

A schema that requires itself, such as a list node whose `next` is required and is another node, has no finite value.
Where something else may stand in its place it is taken out; a whole schema without one is refused.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, Final

from holdfast.router.schemas.numbers import LOWER, UPPER
from holdfast.router.schemas.places import References, SchemaError, children, list_of

ALL_TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
_MAX_ROUNDS: Final = 64
"""Checks all schemas repeatedly, each time with the results of the previous round. Schemas written by hand take two or
three rounds.
"""


class FiniteValues:
    """Whether schemas of a document have finite values. Made from the current document; raises `SchemaError` for a
    document that is too entangled.
    """

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
        if not all(item in self for item in list_of(schema, "allOf")):
            return "allOf"
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema and not any(item in self for item in list_of(schema, keyword)):
                return keyword
        names = types_of(schema)
        needs = (("object", "required"), ("object", "minProperties"), ("array", "minItems"))
        return next((keyword for name, keyword in needs if name in names and schema.get(keyword)), "type")

    def _has_one(self, schema: Mapping[str, Any]) -> bool:
        if "$ref" in schema and self._target(schema) not in self:
            return False
        if not all(item in self for item in list_of(schema, "allOf")):
            return False
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema and not any(item in self for item in list_of(schema, keyword)):
                return False
        if "const" in schema or "enum" in schema:
            return True
        return any(self._has_one_of_type(schema, name) for name in types_of(schema))

    def _has_one_of_type(self, schema: Mapping[str, Any], name: str) -> bool:
        if name == "object":
            properties, rest = _map(schema, "properties"), schema.get("additionalProperties", True)
            required = [item for item in list_of(schema, "required") if isinstance(item, str)]
            if not required and _least(schema, "minProperties"):
                possible = (rest, *properties.values(), *_map(schema, "patternProperties").values())
                return any(item in self for item in possible)
            return all(properties.get(item, rest) in self or "patternProperties" in schema for item in required)
        if name == "array":
            first, rest = array_items(schema)
            count = _least(schema, "minItems")
            return all(item in self for item in first[:count]) and (len(first) >= count or rest in self)
        return True

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """Target of a reference. A target that cannot be found is refused elsewhere."""
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
    return list_of(schema, "prefixItems"), items


def _least(schema: Mapping[str, Any], keyword: str) -> int:
    """A count; 0 for a value that is not one, which is refused elsewhere."""
    count = schema.get(keyword, 0)
    is_count = isinstance(count, int) or (isinstance(count, float) and math.isfinite(count))
    return max(0, int(count)) if is_count else 0


def _map(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    found = schema.get(keyword)
    return found if isinstance(found, dict) else {}


_DEPTH: Final = 12
"""References and `allOf` that are followed one inside another."""
_MAX_LOOKS: Final = 20_000
"""Maximum number of compared pairs of a document; pairs beyond it count as overlapping."""


class Disjointness:
    """Disjointness of schemas of one document."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._num_looks = 0

    def first_overlap(self, branches: list[Any], beside: dict[str, Any]) -> tuple[int, int] | None:
        """The first two branches that may share a value that matches `beside`, too; None: no two do."""
        whole = [item if isinstance(item, bool) else {"allOf": [item, beside]} for item in branches]
        pairs = combinations(range(len(branches)), 2)
        return next((pair for pair in pairs if not self.are_disjoint(whole[pair[0]], whole[pair[1]])), None)

    def are_disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether it is certain."""
        if one is False or other is False:
            return True
        self._num_looks += 1
        if one is True or other is True or depth > _DEPTH or self._num_looks > _MAX_LOOKS:
            return False
        firsts, seconds = list(self._parts(one, depth)), list(self._parts(other, depth))
        shared = frozenset(ALL_TYPES).intersection(*map(_kinds, (*firsts, *seconds)))
        return (
            not shared
            or any(self._differ(first, second, shared, depth) for first in firsts for second in seconds)
            or self._all_alternatives_differ(one, other, depth)
        )

    def _all_alternatives_differ(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        for first, second in ((one, other), (other, one)):
            for part in self._parts(first, depth):
                for keyword in ("anyOf", "oneOf"):
                    options = part.get(keyword)
                    if isinstance(options, list) and self._all_differ(options, second, depth + 1):
                        return True
        return False

    def _all_differ(self, options: list[Any], other: Any, depth: int) -> bool:
        return bool(options) and all(self.are_disjoint(option, other, depth) for option in options)

    def _parts(self, schema: Any, depth: int) -> Iterator[dict[str, Any]]:
        """The schema, and further schemas that its values match."""
        if not isinstance(schema, dict) or depth > _DEPTH:
            return
        yield schema
        for item in schema.get("allOf", ()):
            yield from self._parts(item, depth + 1)
        if "$ref" in schema:
            try:
                yield from self._parts(self._references.target(schema), depth + 1)
            except (LookupError, ValueError, TypeError):
                return

    def _differ(self, one: dict[str, Any], other: dict[str, Any], shared: frozenset[str], depth: int) -> bool:
        """Whether no value of the `shared` types matches both."""
        if (values := _values(one)) is not None and (others := _values(other)) is not None:
            return {_key(value) for value in values}.isdisjoint(map(_key, others))
        if shared <= {"number"}:
            return _are_apart(one, other)
        return shared == {"object"} and self._tags_differ(one, other, depth)

    def _tags_differ(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """A property that one of them requires tells objects apart if its schemas are disjoint."""
        names = {name for schema in (one, other) for name in schema.get("required", ()) if isinstance(name, str)}
        return any(self.are_disjoint(_property(one, name), _property(other, name), depth + 1) for name in names)


def _kinds(schema: dict[str, Any]) -> frozenset[str]:
    values = _values(schema)
    if values is not None:
        return frozenset(map(_kind, values))
    named = frozenset("number" if name == "integer" else name for name in types_of(schema))
    return named & frozenset(ALL_TYPES)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next(name for kind, name in names if isinstance(value, kind))


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _key(value: Any) -> tuple[str, Any]:
    """Equal for values that JSON has for equal: 1 and 1.0, not true and 1."""
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    if isinstance(value, dict):
        return "object", frozenset((name, _key(item)) for name, item in value.items())
    return _kind(value), value


def _property(schema: dict[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _are_apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two ranges of numbers, or a value and a range, do not meet."""
    (low, high), (other_low, other_high) = _range(one), _range(other)
    if low is None or high is None or other_low is None or other_high is None:
        first = high is not None and other_low is not None and _before(high, other_low)
        return first or (other_high is not None and low is not None and _before(other_high, low))
    return _before(high, other_low) or _before(other_high, low)


def _before(high: tuple[float, bool], low: tuple[float, bool]) -> bool:
    return high[0] < low[0] or (high[0] == low[0] and (high[1] or low[1]))


def _range(schema: dict[str, Any]) -> tuple[tuple[float, bool] | None, tuple[float, bool] | None]:
    """Both ends, each with whether it is exclusive."""
    if (values := _values(schema)) is not None:
        numbers = [value for value in values if _kind(value) == "number"]
        return (min(numbers), False), (max(numbers), False)
    lows = [(schema[key], key == LOWER[1]) for key in LOWER if key in schema]
    highs = [(schema[key], key == UPPER[1]) for key in UPPER if key in schema]
    low = max(lows, default=None, key=lambda end: (end[0], end[1]))
    return low, min(highs, default=None, key=lambda end: (end[0], not end[1]))
