"""Material of an audit: prompts, texts to score, schemas by keyword, tools.

Every prompt begins with the audit's nonce, so that no cache of the server has seen it.
"""

from dataclasses import dataclass
from typing import Any, Final

_SUBJECTS: Final = (
    ("The harbour of the old town lies below three hills. Boats leave it at dawn for the islands, and", False),
    ("red blue green red blue green red blue green red blue green red blue green red blue green red", True),
    ("def area_of(shapes):\n    total = 0.0\n    for shape in shapes:\n        total +=", False),
    ("Question: which rivers cross the plain between the two mountain ranges?\nAnswer: the first river is", False),
    ("A recipe for bread: flour, water, salt and yeast. First mix the flour with the water, then", False),
    ("1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", True),
    ("Der Zug nach Süden fährt um sieben Uhr ab. Wer früher ankommt, kann im Café auf dem Bahnsteig", False),
    ("Dear colleague, thank you for the report of last week. We have read it with interest and would", False),
)

UNICODE: Final = "naïve café 日本語 東京 🙂🚀 ελληνικά Привет " * 3
"""Characters of two, three and four bytes, which a model tends to go on with."""

TEXTS: Final = {
    "prose": "The clock in the hall struck nine while the guests were still at table. Nobody spoke of the letter that "
    "had come in the morning, though each of them had read it, and each of them knew what it would mean for the house.",
    "facts": "Water boils at a lower temperature on high mountains because the pressure of the air is lower there. At "
    "sea level it boils at one hundred degrees Celsius, and at four thousand metres at about eighty-six degrees.",
    "code": "def mean(values):\n    if not values:\n        raise ValueError('no values')\n    return sum(values) / "
    "len(values)\n\n\ndef variance(values):\n    middle = mean(values)\n    return mean([(v - middle) ** 2 for v in "
    "values])\n",
    "numbers": "Population by year: 1990: 52,300; 1995: 54,100; 2000: 57,020; 2005: 61,480; 2010: 66,905.",
}
"""Fixed texts whose perplexity is compared with a reference's."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and whether it repeats itself, so that drafts by lookup would fit it."""

    text: str
    is_repetitive: bool


def prompts(nonce: str, number: int) -> list[Prompt]:
    """Prompts, `number` of them, of different kinds; none is a prefix of another."""
    return [
        Prompt(f"Note {nonce}-{n}. {text}", repetitive)
        for n in range(number)
        for text, repetitive in (_SUBJECTS[n % len(_SUBJECTS)],)
    ]


def fillers(nonce: str, number: int) -> list[str]:
    """Other prompts of different lengths, to share a batch with."""
    return [f"Filler {nonce}-{n}: " + "lorem ipsum dolor sit amet, " * (1 + 3 * n) for n in range(number)]


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "type": _object(alive={"type": "boolean"}, count={"type": "integer"}),
    "enum": _object(colour={"enum": ["red", "green", "blue"]}),
    "const": _object(kind={"const": "ticket"}),
    "unicode": _object(word={"enum": ["naïve", "日本語", "🙂🚀", 'quote " and \\ slash']}),
    "minimum, maximum": _object(level={"type": "integer", "minimum": 3, "maximum": 7}),
    "minLength, maxLength": _object(code={"type": "string", "minLength": 2, "maxLength": 5}),
    "pattern": _object(plate={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}),
    "minItems, maxItems": _object(
        parts={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 3}
    ),
    "anyOf": _object(value={"anyOf": [{"type": "boolean"}, {"type": "null"}]}),
    "$ref": _object(origin={"$ref": "#/$defs/point"})
    | {"$defs": {"point": _object(x={"enum": [0, 1]}, y={"enum": [0, 1]})}},
    "nested": _object(outer=_object(inner=_object(flag={"type": "boolean"}))),
    "types": _object(size={"type": ["boolean", "null"]}),
    "oneOf": _object(shade={"oneOf": [{"const": "dark"}, {"const": "light"}]}),
    "allOf": _object(rank={"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 4}]}),
    "exclusiveMinimum, exclusiveMaximum": _object(
        share={"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 5}
    ),
    "multipleOf": _object(cents={"type": "integer", "minimum": 10, "maximum": 90, "multipleOf": 10}),
    "prefixItems": _object(
        pair={"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["left", "right"]}], "items": False}
        | {"minItems": 2, "maxItems": 2}
    ),
    "format": _object(day={"type": "string", "format": "date"}),
    "optional": _object(name={"enum": ["ada", "bob"]}) | {"required": []},
    "escapes": _object(path={"enum": ["a/b", "tab\tand\nline", "\u00e9\u2028"]}),
}
"""Schemas by the keyword that they are about; all of short instances."""

TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "description": "Switch a lamp.",
        "parameters": _object(
            room={"enum": ["kitchen", "hall"]}, on={"type": "boolean"}, level={"enum": [1, 2, 3], "type": "integer"}
        ),
    },
}
OTHER_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "open_door",
        "description": "Open a door.",
        "parameters": _object(door={"enum": ["front", "back"]}),
    },
}
