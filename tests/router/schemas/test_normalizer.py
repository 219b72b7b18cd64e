"""JSON schemas: what is accepted is enforced, what is not is refused by the keyword."""

import contextlib
import copy
import itertools
import json
import logging
from functools import cache
from typing import Any

import jsonschema
import pytest

from holdfast.router.schemas.normalizer import _KEYWORDS, normalized
from holdfast.router.schemas.places import SchemaError
from holdfast.worker.errors import InvalidRequestError
from tests.router.schemas.walks import Walker

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
CLOSED = {"additionalProperties": False}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
_OTHERS = ("$id", "$ref", "$schema", "additionalItems", "additionalProperties", "exclusiveMinimum", "format", "items")
_OTHERS += ("exclusiveMaximum", "maximum", "minimum", "multipleOf", "nullable", "pattern", "prefixItems", "type")


def obj(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **others}


def tagged(tag: str, **properties: Any) -> dict[str, Any]:
    return obj({"kind": {"const": tag}, **properties}, required=["kind"], additionalProperties=False)


ENFORCED: list[Any] = [
    # names that are declared and match patterns
    obj({"a": DIGIT}, required=["a"], patternProperties={"^a$": {"type": "integer"}}, additionalProperties=False),
    obj({"a": DIGIT}, patternProperties={"^a": {"type": "integer", "minimum": 3}}, additionalProperties=False),
    obj({"ab": {"type": "string"}}, patternProperties={"^a": {"type": "integer"}}),
    obj({}, required=["foo"], patternProperties={"^f": DIGIT}, additionalProperties=False),
    obj({}, patternProperties={"^(a|b)$": DIGIT}, additionalProperties=False, minProperties=2),
    # numbers
    {"type": "integer", "minimum": 2**53, "maximum": 2**53 + 2},
    {"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 4},
    {"type": "number", "multipleOf": 0.01, "minimum": 0.1, "maximum": 0.2},
    {"enum": [0.1, -3, 2**53]},
    # finite values
    obj({"c": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, required=["c"]),
    {"type": "array", "items": {"$ref": "#"}},
    obj({"n": {"$ref": "#/$defs/node"}, "x": DIGIT}, required=["x"], **{"$defs": {"node": NODE}}),
    # texts that spell special tokens
    {"enum": ["<filename>", "<|endoftext|>", "<s>"]},
    {"const": "<|endoftext|>"},
    # decimals that are whole
    {"type": "array", "minItems": 1.0, "maxItems": 2.0, "items": DIGIT},
    {"type": "string", "minLength": 1.0, "maxLength": 3.0},
    {"type": "string", "pattern": "^[ab]{1,3}$", "maxLength": 2**70},
    {"type": "array", "items": DIGIT, "minItems": 1, "maxItems": 1e30},
    obj({"a": DIGIT, "b": DIGIT}, minProperties=1.0, additionalProperties=False),
    # what says nothing
    {"type": "array", "minContains": 2, "items": DIGIT, "maxItems": 2},
    {"then": {"minimum": 3}, "type": "integer"},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"not": False, "type": "boolean"},
    True,
    {},
    # disjoint branches
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    {"oneOf": [{"type": ["null", "boolean"]}, DIGIT]},
    {"oneOf": [tagged("a", x=DIGIT), tagged("b", x={"type": "boolean"})]},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": tagged("a"), "b": tagged("b")}},
    {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}]},
    {"oneOf": [{"const": 1}, {"const": True}]},
    {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c"]}]},
    # strings
    {"type": "string", "pattern": r"^\d{2}$"},
    {"type": "string", "pattern": r"^\w{1,3}$"},
    {"type": "string", "pattern": r"^\W{1,2}\D$"},
    {"type": "number", "maximum": 9.7e26, "minimum": 3},
    {"$schema": "http://example.com/own", "type": "integer", "maximum": 3, "minimum": 0},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "no-such-format", "maxLength": 3},
]

REFUSED: list[tuple[Any, str]] = [
    (obj({}, patternProperties={"^a": {"type": "integer"}, "b$": {"type": "string"}}), "patternProperty"),
    (obj({}, patternProperties={"^a$": {"const": 1}}, additionalProperties=False, minProperties=2), "minProperties"),
    (obj({}, minProperties=2), "minProperties"),
    (obj({"ab": {"type": "string"}}, required=["ab"], patternProperties={"^a": {"type": "integer"}}), "'ab'"),
    ({"const": 1234567890123456789}, "const"),
    ({"const": {"a": [2**53 + 1]}}, "const"),
    ({"enum": [9007199254740993]}, "enum"),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "minimum"),
    ({"type": "integer", "exclusiveMinimum": 2**53, "maximum": 2**53 + 2}, "minimum"),
    ({"type": ["integer", "null"], "maximum": -(2**53) - 1}, "maximum"),
    ({"type": "integer", "minimum": 2**64 - 3, "maximum": 2**64 - 1}, "minimum"),
    ({"type": "integer", "multipleOf": 2**53 + 1}, "multipleOf"),
    ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum"),
    ({"const": 0.12345678901234567}, "const"),
    ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, "$ref"),
    (obj({"c": {"$ref": "#"}}, required=["c"]), "required"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "minItems"),
    ({"type": "string", "minLength": 2**53 + 1}, "minLength"),
    ({"properties": {"a": {"additionalProperties": "x"}}}, "properties.a.additionalProperties"),
    ({"type": "array", "items": 5}, "items"),
    ({"type": "array", "unevaluatedItems": 5}, "unevaluatedItems"),
    ({"properties": {"a": {"type": "array", "minItems": 1e10}}}, "properties.a.minItems"),
    ({"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}, "minProperties"),
    ({"type": "object", "patternProperties": {"^a": {"$ref": "#"}}, "minProperties": 1, **CLOSED}, "minProperties"),
    ({"allOf": [{"$ref": "#"}]}, "allOf"),
    ({"anyOf": [{"$ref": "#"}, False]}, "anyOf"),
    (False, "matches nothing"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": DIGIT}, "contains"),
    ({"type": "strin"}, "type"),
    (obj({"x": {"minLength": 1.5}}), "properties.x.minLength"),
    (obj({"x": 3}), "properties.x"),
    ({"enum": []}, "enum"),
    ({"type": "integer", "const": 1e22}, "const"),
    ({"type": "integer", "const": -1e19}, "const"),
    ({"type": ["integer", "null"], "enum": [5, 9.3e18]}, "enum"),
    ({"allOf": [{"type": "integer"}, {"const": [1e20]}]}, "const"),
    ({"$ref": "http://example.com/other"}, "$ref"),
    ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "if"),
    ({"type": "number", "minimum": 9.7e26}, "minimum"),
    (obj({"a": {"$id": "x", "$ref": "#/$defs/node"}}, **{"$defs": {"node": NODE}}), "$id"),
    ({"type": "string", "pattern": r"[a\W]"}, "pattern"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"not": {"type": "string"}}, "not"),
]


@cache
def walker() -> Walker:
    return Walker()


@pytest.mark.parametrize("schema", ENFORCED, ids=lambda schema: json.dumps(schema)[:60])
def test_what_is_accepted_is_enforced(schema: Any):
    grammar = walker().compile(json=json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    walks = [walker().walk(grammar, seed) for seed in range(8)]
    assert {walk.end for walk in walks} <= {"done", "length"}, walks
    for walk in walks:
        if walk.end == "done":
            validator.validate(json.loads(walk.text))
    assert any(walk.end == "done" for walk in walks), walks


@pytest.mark.parametrize(("schema", "named"), REFUSED, ids=lambda case: json.dumps(case)[:60])
def test_what_cannot_be_enforced_is_refused_by_the_keyword(schema: Any, named: str):
    with pytest.raises(InvalidRequestError) as refused:
        walker().compile(json=json.dumps(schema))
    assert named in refused.value.limit
    assert "coerce_one_of" not in refused.value.limit


VALUES: list[Any] = [
    *("1", "", "#", 1, -1, 1.5, 1e400, float("nan"), 10**400, True, False, None),
    *([], {}, [1], ["a"], [{}], [[]], [None]),
    *({"a": 1}, {"a": {}}, {"a": None}, {"a": []}),
]
HOLDERS: list[dict[str, Any]] = [
    {},
    *({"type": name} for name in ("object", "array", "string", "integer")),
    obj({"a": {"type": "null"}}, required=["a"], **CLOSED),
    {"items": {"type": "null"}},
]


@pytest.mark.parametrize("keyword", sorted({*_KEYWORDS, *_OTHERS}))
def test_a_keyword_of_any_value_is_normalized_or_refused(keyword: str):
    for value, holder in itertools.product(VALUES, HOLDERS):
        schema = {**holder, keyword: value}
        tagged = obj({"t": schema}, required=["t"])
        for written in (schema, tagged, {"oneOf": [tagged, obj({"t": {"const": 1}}, required=["t"])]}):
            with contextlib.suppress(SchemaError):
                normalized(written)


@pytest.mark.parametrize("schema", [*ENFORCED, *(schema for schema, _ in REFUSED)], ids=repr)
def test_the_schema_that_was_given_stays_as_it_is(schema: Any):
    before = copy.deepcopy(schema)
    with contextlib.suppress(SchemaError):
        normalized(schema)
    assert schema == before


def test_digits_of_patterns_are_ascii_as_in_ecma_262():
    grammar = walker().compile(json='{"type": "string", "pattern": "^\\\\d$"}')
    assert {walker().walk(grammar, seed).text for seed in range(80)} == {f'"{digit}"' for digit in range(10)}


def test_unknown_formats_are_annotations_with_a_warning_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert "format" not in normalized({"type": "string", "format": "never-heard-of"}).schema
    assert [record.getMessage().split(" of ")[0] for record in caplog.records] == ["format 'never-heard-of'"]


def test_what_would_take_long_is_refused_soon():
    """Each takes the work of a few hundred looks, not of all pairs."""
    chained = {f"n{i}": {"allOf": [{"$ref": f"#/$defs/n{i - 1}"}]} for i in range(1, 1000)}
    tangled = {
        "$defs": {"n0": {"type": "null"}, **chained},
        "anyOf": [{"$ref": f"#/$defs/n{i}"} for i in range(999, -1, -1)],
    }
    many = {"patternProperties": {f"^x{i}": True for i in range(100)}}
    wide = {"oneOf": [{"properties": {f"p{i}": {"const": i}}} for i in range(1000)]}
    for schema, named in ((tangled, "$ref"), (many, "patternProperties"), (wide, "oneOf")):
        with pytest.raises(SchemaError, match=named.replace("$", r"\$")):
            normalized(schema)
