"""Structured outputs: the shape that an output must have: a JSON schema, any JSON object, a regex, a choice,
a grammar.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.value_types import STRUCTURE_FIELDS, check_names, is_flag, is_text, takes_neutral

FIELD = "sampling_params.structured_outputs"


@takes_neutral(STRUCTURE_FIELDS, f"{FIELD}.")
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Constraint of an output; exactly one of the fields is set. The call shape follows vLLM's class of the same name,
    whose other fields are accepted with their neutral values (`STRUCTURE_FIELDS`).

    Raises `InvalidRequestError`, naming the field.
    """

    json: str | Mapping[str, object] | bool | None = None
    """A JSON schema, as an object, as True, which any value matches, or as its text. Stored as text."""
    json_object: bool | None = False
    """Any JSON object."""
    regex: str | None = None
    """Regex that the whole output matches, in the syntax of Rust's regex."""
    choice: Sequence[str] | None = None
    """The whole output is one of these. Stored as a tuple."""
    grammar: str | None = None
    """A context-free grammar: in the syntax of Lark, as llguidance reads it, from `start` on; or in EBNF as XGrammar
    and llama.cpp write it (`root ::= "yes" | "no"`), from `root` on."""

    def __post_init__(self) -> None:
        is_list = isinstance(self.choice, Collection) and not isinstance(self.choice, str | bytes)
        if self.choice is not None and not is_list:
            raise InvalidRequestError(f"{FIELD}.choice", self.choice, "must be a list of texts")
        if self.json_object is None:  # vLLM's default
            object.__setattr__(self, "json_object", False)
        if not is_flag(self.json_object):
            raise InvalidRequestError(f"{FIELD}.json_object", self.json_object, "must be True or False")
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
        if isinstance(self.json, Mapping) or self.json is True:
            object.__setattr__(self, "json", _json_text(self.json))
        chosen = [name for name in _KINDS if self._has(name)]
        if len(chosen) != 1:
            raise InvalidRequestError(FIELD, chosen, f"must have exactly one of {', '.join(_KINDS)}")
        texts = self.choice if self.choice is not None else (self.text,)
        are_texts = bool(texts) and all(is_text(text) and text for text in texts)
        if not are_texts and not self.json_object:
            what = "an object, true, or a JSON text" if self.kind == "json" else "text"
            limit = f"must be {what} in valid Unicode, and not empty"
            raise InvalidRequestError(f"{FIELD}.{self.kind}", getattr(self, self.kind), limit)

    @classmethod
    def of(cls, given: "StructuredOutputs | Mapping[str, object]") -> "StructuredOutputs":
        """The same, or made from a mapping of the fields."""
        if isinstance(given, StructuredOutputs):
            return given
        check_names(given, _KINDS, FIELD, STRUCTURE_FIELDS)
        return cls(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in _KINDS if self._has(name))

    def _has(self, name: str) -> bool:
        """Whether a field is set, by identity: a value that equals nothing, or cannot be compared, is a wrong value."""
        value = getattr(self, name)
        return value is not None and value is not False

    @property
    def text(self) -> str:
        """The field that is set, where it is a text; else empty."""
        return next((text for text in (self.json, self.regex, self.grammar) if isinstance(text, str)), "")

    @property
    def num_chars(self) -> int:
        """Characters of the structure, for limits."""
        return len(self.text) + sum(map(len, self.choice or ()))


def dead_end() -> InvalidRequestError:
    """The error of a request whose output no token can follow, and that does not match yet."""
    limit = "the output cannot be completed: no token fits its grammar, or the grammar is too complex"
    return InvalidRequestError(FIELD, None, limit)


_KINDS = tuple(field.name for field in fields(StructuredOutputs))


def _json_text(schema: Mapping[str, object] | bool) -> str:
    try:
        return json.dumps(dict(schema) if isinstance(schema, Mapping) else schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{FIELD}.json", schema, f"must be a JSON schema: {error}") from None
