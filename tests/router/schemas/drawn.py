"""JSON schemas drawn by a seed, with keywords beside each other that nobody would write together."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

_TYPES: Final = ("integer", "number", "string", "boolean", "null", "array", "object")
_NUMBERS: Final = (
    *(0, 1, -1, 2, 3, 5, 7, 10, 0.5, 0.1, 1.5, -2.5, 2.0, 1e3, 1e-3, 100, 123.456, 1 / 3, 12345678.9),
    *(2**31, 2**53, 2**53 + 1, -(2**53) - 1, 2**60, 2**63, 2**64, 1e15, 1e16, 1e18, 1e19, 1e21, 1e22, -1e22, 1e300),
)
_STEPS: Final = (1, 2, 3, 5, 0.5, 2.5, 1.0, 0.25, 7, 10, 100, 3.0, 1.5)
"""Of `multipleOf`: binary fractions, as the checker divides in floating point."""
_STRINGS: Final = ("a", "b", "", "ab", "é", "😀", '"', "\\", "\n", "<s>", "1", "null", "$", "x y", "\0", "\x7f", "/")
_KEYS: Final = ("a", "b", "c", "ab", "", "é", "a b", '"q', "__proto__")
_PATTERNS: Final = (
    *("^a", "a$", "^a+$", "b", "^[ab]{1,3}$", "^\\d+$", "^x", "", "^.$", "[0-9]", "^(a|b)$", "^a|b$", "^\\w*$"),
    *("\\s", "^[^a]*$", "^\\S+$", "^a.c$", "^\\u0061$", "^[a-c]?$", "^\\x41$"),
)
_FORMATS: Final = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "duration", "hostname", "zork")
_SIZES: Final = (0, 1, 2, 3, 1.0, 2.0, 4)

_Draw = Callable[[Random, int], Any]


def drawn_schema(seed: int) -> dict[str, Any]:
    """A schema of up to three levels with two definitions, the same for the same seed."""
    rng = Random(seed)
    schema = _schema(rng, 3)
    root = dict(schema) if isinstance(schema, Mapping) else {"allOf": [schema]}
    return root | {"$defs": {"x": _schema(rng, 2), "y": _schema(rng, 1)}}


def _schema(rng: Random, depth: int) -> Any:
    if rng.random() < 0.05:
        return rng.choice((True, False, {}))
    schema, types = _typed(rng)
    _add(schema, rng, depth, _ANY)
    for name, keywords in _OF_TYPE.items():
        if name in types and (depth or name not in ("array", "object")):
            _add(schema, rng, depth, keywords)
    if depth:
        _add(schema, rng, depth, _COMBINED)
    return schema


def _typed(rng: Random) -> tuple[dict[str, Any], list[str]]:
    chance = rng.random()
    if chance < 0.6:
        name = rng.choice(_TYPES)
        return {"type": name}, [name]
    if chance < 0.75:
        names = rng.sample(_TYPES, rng.randint(1, 3))
        return {"type": names}, names
    return {}, ["integer", "string", "array", "object"]


def _add(schema: dict[str, Any], rng: Random, depth: int, keywords: Mapping[str, tuple[float, _Draw]]) -> None:
    for name, (chance, draw) in keywords.items():
        if rng.random() < chance:
            schema[name] = draw(rng, depth)


def _value(rng: Random, depth: int) -> Any:
    if depth and rng.random() < 0.25:
        return [_value(rng, 0) for _ in range(rng.randrange(3))]
    if depth and rng.random() < 0.3:
        return {rng.choice(_KEYS): _value(rng, 0) for _ in range(rng.randrange(3))}
    return rng.choice((None, rng.random() < 0.5, rng.choice(_NUMBERS), rng.choice(_STRINGS), rng.randint(-9, 9)))


def _number(rng: Random, _: int) -> Any:
    return rng.choice(_NUMBERS) if rng.random() < 0.8 else rng.randint(-20, 20)


def _one_of(*values: Any) -> _Draw:
    return lambda rng, _: rng.choice(values)


def _below(rng: Random, depth: int) -> Any:
    return _schema(rng, depth - 1)


def _some_below(most: int) -> _Draw:
    return lambda rng, depth: [_schema(rng, depth - 1) for _ in range(rng.randint(1, most))]


def _by_name(names: tuple[str, ...], most: int) -> _Draw:
    return lambda rng, depth: {name: _schema(rng, depth - 1) for name in rng.sample(names, rng.randint(1, most))}


_BOUNDS: Final[dict[str, tuple[float, _Draw]]] = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (0.2, _number)),
    "multipleOf": (0.12, _one_of(*_STEPS)),
}
_ANY: Final[dict[str, tuple[float, _Draw]]] = {
    "const": (0.12, lambda rng, _: _value(rng, 1)),
    "enum": (0.12, lambda rng, _: [_value(rng, 1) for _ in range(rng.randint(1, 4))]),
    "$ref": (0.1, _one_of("#/$defs/x", "#/$defs/y")),
    "title": (0.05, _one_of("t")),
}
_OF_TYPE: Final[dict[str, dict[str, tuple[float, _Draw]]]] = {
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "string": {
        "minLength": (0.25, _one_of(*_SIZES)),
        "maxLength": (0.25, _one_of(0, 1, 2, 3, 5, 4.0)),
        "pattern": (0.25, _one_of(*_PATTERNS)),
        "format": (0.1, _one_of(*_FORMATS)),
    },
    "array": {
        "items": (0.5, _below),
        "prefixItems": (0.3, _some_below(2)),
        "minItems": (0.3, _one_of(*_SIZES)),
        "maxItems": (1.0, _one_of(0, 1, 2, 3)),
        "uniqueItems": (0.05, _one_of(True, False)),
        "contains": (0.05, _below),
        "minContains": (0.05, _one_of(*_SIZES)),
        "unevaluatedItems": (0.05, _below),
    },
    "object": {
        "properties": (0.6, _by_name(_KEYS, 3)),
        "required": (0.4, lambda rng, _: rng.sample(_KEYS, rng.randint(0, 2))),
        "additionalProperties": (0.5, lambda rng, depth: rng.choice((True, False, False, _schema(rng, depth - 1)))),
        "patternProperties": (0.25, _by_name(_PATTERNS, 2)),
        "minProperties": (0.15, _one_of(*_SIZES)),
        "maxProperties": (0.15, _one_of(*_SIZES)),
        "propertyNames": (0.05, _below),
        "dependentRequired": (0.04, _one_of({"a": ["b"]})),
        "unevaluatedProperties": (0.05, _below),
    },
}
_COMBINED: Final[dict[str, tuple[float, _Draw]]] = {
    "anyOf": (0.15, _some_below(3)),
    "oneOf": (0.1, _some_below(3)),
    "allOf": (0.15, _some_below(3)),
    "not": (0.03, _below),
}
