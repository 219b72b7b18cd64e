"""Values that a schema takes and values that it does not: its grammar accepts the ones and not the others."""

import json
from functools import cache
from typing import Any

import pytest

from tests.router.schemas.walks import Walker

NULL: dict[str, Any] = {"type": "null"}
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
LIST = {"type": "array", "items": {"$ref": "#/$defs/list"}, "minItems": 1}

ENFORCED = [  # schema, values that it accepts, values that it does not
    # patterns of names
    (
        {**CLOSED, "properties": {"a": DIGIT}, "required": ["a"], "patternProperties": {"^a$": {"maximum": 4}}},
        [{"a": 3}],
        [{"a": 5}],
    ),
    ({**CLOSED, "patternProperties": {"^[ab]$": NULL}}, [{"a": None, "b": None}], [{"c": None}]),
    (
        {**CLOSED, "patternProperties": {"^(x|y)$": NULL, "^x": {"type": ["null", "boolean"]}}},
        [{"x": None}],
        [{"x": True}],
    ),
    ({**CLOSED, "patternProperties": {"a/b": NULL}, "properties": {"a/b": True}}, [{"a/b": None}], [{"a/b": 1}]),
    ({"properties": {"a": DIGIT}}, [{"a": 1}, {"b": "x"}], [{"a": "x"}]),
    # numbers
    ({"const": 2**53}, [2**53], [2**53 + 2]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, 2**60], [2**63]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [2**62], [-1]),
    ({"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 3}, [2], [1, 3]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.1}, [0.05], [0, 0.2]),
    ({"type": "number", "maximum": 3.141592653589793}, [2], [3.15]),
    ({"type": "number", "maximum": 1.7976931348623157e308}, [1], []),
    ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, [2], [1]),
    # counts as decimals, and keywords that say nothing
    ({"type": "array", "items": NULL, "minItems": 1.0, "maxItems": 2.0}, [[None]], [[], [None] * 3]),
    ({"type": "string", "minLength": 1.0}, ["a"], [""]),
    ({"minContains": 2, "maxContains": 3, "type": "array", "items": NULL}, [[]], [[1]]),
    ({"contains": {"const": 1}, "minContains": 0, "type": "array"}, [[2]], []),
    ({"type": "array", "uniqueItems": True, "items": NULL, "maxItems": 1}, [[None]], [[None, None]]),
    ({"uniqueItems": True, "type": "string"}, ["a"], []),
    ({"then": False, "else": False, "const": 1}, [1], [2]),
    ({"dependentRequired": {}, "propertyNames": {"type": "string"}, "not": False, "const": 1}, [1], []),
    ({"type": "object", "properties": {"a": NULL}, "unevaluatedProperties": False}, [{"a": None}], [{"b": None}]),
    (True, [1, "a", None], []),
    ({"properties": {"a": True, "b": False}, "type": "object"}, [{"a": 1}], [{"b": 1}]),
    # oneOf of disjoint branches
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
    ({"oneOf": [{"$ref": "#/$defs/a"}, NULL], "$defs": {"a": {"type": "string"}}}, ["a", None], [1]),
    ({"oneOf": [{"const": 1}, {"const": 2}, {"const": True}]}, [1, 2, True], [3]),
    ({"oneOf": [{"maximum": 1}, {"exclusiveMinimum": 1}], "type": "integer"}, [1, 2], ["a"]),
    (
        {"type": "object", "oneOf": [{"properties": {"k": {"const": key}}, "required": ["k"]} for key in "ab"]},
        [{"k": "a"}],
        [{"k": "c"}],
    ),
    ({"oneOf": [{"type": "string"}], "anyOf": [{"maxLength": 1}]}, ["a"], ["ab", 1]),
    # what has no finite value is taken out where it need not be
    ({"anyOf": [{"$ref": "#/$defs/list"}, NULL], "$defs": {"list": LIST}}, [None], [[[]]]),
    (
        {**CLOSED, "properties": {"v": NULL, "next": {"$ref": "#"}}, "required": ["v"]},
        [{"v": None, "next": {"v": None}}],
        [{}],
    ),
    # unsatisfiable parts
    ({"anyOf": [{"type": "integer", "minimum": 3, "maximum": 1}, NULL]}, [None], [2]),
    # texts
    ({"type": "string", "pattern": r"^\d\s.$"}, ["1 a"], ["٣ a", "1 \n"]),
    ({"type": "string", "pattern": r"^[\d\s]\w$"}, ["1a", " a"], ["1é"]),
    ({"type": "string", "pattern": "^[a&&b[]$"}, ["&", "["], ["c"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2023-04-31", "0000-01-01"]),
    ({"type": "string", "format": "time"}, ["23:59:59Z"], ["23:59:60Z", "24:00:00Z"]),
    ({"type": "string", "format": "date", "pattern": "^2"}, ["2024-01-01"], ["1999-01-01"]),
    ({"type": "string", "format": "no-such"}, ["a"], [1]),
    ({"const": "\x00\x1f"}, ["\x00\x1f"], ["a"]),
    ({"enum": ["<|im_end|>", "</s>"]}, ["</s>"], ["s"]),
    # older drafts
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/a",
            "type": "null",
            "definitions": {"a": {"const": 1}},
        },
        [1],
        [None],
    ),
    ({"$ref": "#n", "$defs": {"a": {"$anchor": "n", "oneOf": [{"const": 1}, NULL]}}}, [1, None], [2]),
    ({"$defs": {"unused": {"not": {"type": "null"}}}, "const": 1}, [1], []),
]


@cache
def walker() -> Walker:
    return Walker()


@pytest.mark.parametrize("case", ENFORCED, ids=lambda case: json.dumps(case[0])[:60])
def test_the_values_of_a_schema_are_accepted_and_no_others(case):
    schema, right, wrong = case
    grammar = walker().compile(json=json.dumps(schema))
    written = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in right + wrong]
    accepted = [walker().accepts(grammar, text) for text in written]
    assert accepted == [True] * len(right) + [False] * len(wrong), written


def test_a_name_spelled_with_escapes_is_no_further_name():
    grammar = walker().compile(json={"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"})
    assert walker().accepts(grammar, '{"a":1,"b":"x"}')
    assert not walker().accepts(grammar, '{"a":1,"\\u0061":"x"}')


def test_digits_of_a_regex_are_ascii():
    grammar = walker().compile(regex=r"\d[\w-]\W[]\d]")
    texts = ("1a ]", "1-.7", "٣a ]", "1é ]", "1a ٣")
    assert [walker().accepts(grammar, text) for text in texts] == [True, True, False, False, False]
