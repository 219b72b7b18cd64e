"""JSON schemas of varied shape, made up from a seed, such that a model that babbles can still come to an end."""

import random

Schema = dict[str, object]

NAMES = ("name", "size", "colour", "tags", "parent", "is open", "größe", "x_1")
PATTERNS = ("^[a-z]{2,5}$", "^[A-F0-9]{4}$", r"^\d{3}-\d{2}$", "^(red|green|blue)[0-9]?$", "^v[0-9]{1,2}\\.[0-9]$")


def schema(rng: random.Random) -> Schema:
    """A schema with an object on top, in some of them with definitions that it refers to."""
    names = rng.sample(("Leaf", "Pair", "Tree"), rng.randrange(0, 3))
    top = _object(rng, 3, tuple(names))
    if names:
        top["$defs"] = {name: _value(rng, 1, ()) for name in names}
    if "Tree" in names:  # one that refers to itself
        child = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Tree"}]}
        leaf = {"type": "integer", "minimum": 0, "maximum": 9}
        top["$defs"]["Tree"] = _closed({"leaf": leaf, "child": child}, ["leaf", "child"])
    return top


def _value(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    kinds = [_string, _integer, _number, _choice, lambda _: {"type": rng.choice(["boolean", "null"])}]
    if refs and rng.random() < 0.3:
        return {"$ref": f"#/$defs/{rng.choice(refs)}"}
    if depth == 0 or rng.random() < 0.5:
        return rng.choice(kinds)(rng)
    return rng.choice([_object, _array, _union])(rng, depth - 1, refs)


def _closed(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _object(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    names = rng.sample(NAMES, rng.randrange(1, 4))
    required = rng.sample(names, rng.randrange(0, len(names) + 1))
    made = _closed({name: _value(rng, depth, refs) for name in names}, required)
    if rng.random() < 0.03:
        made["additionalProperties"] = {"type": "boolean"}
    return made


def _array(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    least = rng.randrange(0, 3)
    if rng.random() < 0.25:
        fixed = [_value(rng, 0, refs) for _ in range(2)]
        return {"type": "array", "prefixItems": fixed, "items": False, "minItems": 2}
    return {"type": "array", "items": _value(rng, depth, refs), "minItems": least, "maxItems": least + rng.randrange(3)}


def _union(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    return {"anyOf": [_value(rng, depth, refs), {"type": "null"}]}


def _string(rng: random.Random) -> Schema:
    if rng.random() < 0.5:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if rng.random() < 0.2:
        return {"type": "string", "format": rng.choice(["date", "uuid", "time"])}
    least = rng.randrange(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(0, 12)}


def _integer(rng: random.Random) -> Schema:
    low = rng.randrange(-500, 500)
    if rng.random() < 0.3:
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randrange(2, 50)}
    return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(0, 2000)}


def _number(rng: random.Random) -> Schema:
    low = rng.randrange(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + rng.choice([0.5, 1, 12.25])}


def _choice(rng: random.Random) -> Schema:
    values = ["red", "grün", 'say "hi"', 3, -1.5, True, None]
    return {"const": rng.choice(values)} if rng.random() < 0.3 else {"enum": rng.sample(values, rng.randrange(1, 5))}
