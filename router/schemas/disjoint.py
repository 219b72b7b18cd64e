"""Disjoint schemas: whether no value can match two of them, as far as types, constants, bounds and tags show.

That is what makes `oneOf` the same as `anyOf`, which a grammar can follow.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any, Final

from holdfast.router.schemas.finite import ALL_TYPES, types_of
from holdfast.router.schemas.numbers import LOWER, UPPER
from holdfast.router.schemas.places import References

_DEPTH: Final = 12
"""References and `allOf` that are followed one inside another."""
_MAX_LOOKS: Final = 20_000
"""Pairs that are compared of one document; what is not compared counts as overlapping."""


class Disjointness:
    """Of schemas of one document."""

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
        """The schema, and what a value that matches it matches besides."""
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
