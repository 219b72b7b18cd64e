"""Grammar compiler for structured outputs: a JSON schema, regex, choice, Lark or EBNF becomes an llguidance grammar.

What cannot be enforced is refused here, before the request reaches a replica. A grammar is sent to replicas as text, in
llguidance's format.
"""

import json
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from llguidance import LLMatcher, LLTokenizer

from holdfast.router.schemas.normalizer import normalized_text
from holdfast.router.schemas.patterns import with_ascii_classes
from holdfast.router.schemas.places import SchemaError
from holdfast.router.text.ebnf import ebnf_as_lark, is_ebnf
from holdfast.router.text.grammar_rules import check_finite, lark_rules, with_schemas
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.grammar_matchers import grammar_tokenizer
from holdfast.worker.structured_outputs import FIELD, StructuredOutputs

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON_OPTIONS: Final["JsonCompileOptions"] = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
"""Flexible whitespace lets a model emit blanks without end; `lenient` would silently drop what cannot be enforced."""

_SEPARATORS: Final = ("item_separator", "key_separator")

_KEYWORDS: Final = (  # of a JSON schema, where llguidance's errors do not name them
    ("patternProperty regexes", "patternProperties"),
    ("regex for float range", "minimum, maximum"),
    ("is not present in a registry", "$ref"),
    ("Anchor ", "$ref"),
    ("incompatible types", "type, allOf"),
    ("Regex is empty", "pattern, enum"),
    ("required property", "required"),
    ("min/maxProperties", "minProperties, maxProperties"),
    ("required > maxProperties", "maxProperties"),
    ("circular references", "$ref"),
)

_BYTES: Final = LLTokenizer("byte")
"""A vocabulary of single bytes, whose masks are quickly made."""

KEPT: Final = 64
"""Compiled grammars that are kept: most requests for a model use one of a few."""


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._path = tokenizer.json_path
        self._compiled = lru_cache(maxsize=KEPT)(self._compile)

    def compile(self, structure: StructuredOutputs | None) -> str:
        """The grammar of `structure`; empty for None. The first one of a model, or a very large one, may take a second.

        Raises `InvalidRequestError`, naming the field, if the structure cannot be enforced, for this model or at all.
        """
        return "" if structure is None else self._compiled(structure)

    def _compile(self, structure: StructuredOutputs) -> str:
        field = f"{FIELD}.{structure.kind}"
        try:
            grammar = _grammar(structure)
        except SchemaError as error:
            raise InvalidRequestError(field, structure.text, error.reason) from None
        except ValueError as error:
            raise InvalidRequestError(field, structure.text, f"cannot be read: {error}") from None
        self._check(grammar, field, structure.text, None)
        if self._path is None:
            raise InvalidRequestError(FIELD, structure.kind, "is not possible here: the model has no tokenizer.json")
        self._check(grammar, field, structure.text, self._tokenizer)
        if _has_no_beginning(grammar, _BYTES) and _has_no_beginning(grammar, self._tokenizer):
            raise InvalidRequestError(field, structure.text, "cannot be enforced: no output matches it")
        return grammar

    def check_output(self, field: str, grammar: str, token_ids: Sequence[int], eos_token_ids: Collection[int]) -> None:
        """Raises `InvalidRequestError` for `field` if no output that matches a compiled grammar begins with the tokens.

        The last token may be an end of sequence if the grammar accepts the output there.
        """
        has_ended = bool(token_ids) and token_ids[-1] in eos_token_ids
        rest = list(token_ids[:-1] if has_ended else token_ids)
        known = list(takewhile(lambda token_id: token_id < self._tokenizer.vocab_size, rest))
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        num_right = matcher.validate_tokens(known)
        if matcher.is_error():
            return  # llguidance's limits are exceeded: a replica ends such an output early
        is_right = num_right == len(rest)
        if is_right and has_ended:
            is_right = matcher.consume_tokens(rest) and matcher.is_accepting()
        if not is_right:
            limit = f"token {num_right} is not allowed there: the output must match {FIELD}"
            raise InvalidRequestError(field, token_ids[num_right], limit)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Built from the same file as on a replica, so that what compiles here compiles there."""
        assert self._path is not None
        try:
            return grammar_tokenizer(self._path)
        except ValueError as error:
            limit = f"is not possible with this model's tokenizer: {error}"
            raise InvalidRequestError(FIELD, self._path.name, limit) from None

    def _check(self, grammar: str, field: str, text: str, tokenizer: LLTokenizer | None) -> None:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
        if is_error:
            message = "; ".join(messages)
            keyword = next((keyword for sign, keyword in _KEYWORDS if sign in message), "")
            if message.startswith("Unsatisfiable"):
                keyword = keyword or _keywords(text)
            raise InvalidRequestError(field, text, f"cannot be enforced: {keyword}{': ' * bool(keyword)}{message}")


def _keywords(text: str) -> str:
    """The keywords at the root of a schema."""
    try:
        schema = json.loads(text)
    except ValueError:
        return ""
    return ", ".join(sorted(schema.keys() - {"$defs", "definitions"})) if isinstance(schema, dict) else ""


def _has_no_beginning(grammar: str, tokenizer: LLTokenizer) -> bool:
    """Whether no token may come first, nor the end."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    matcher.compute_bitmask()
    return matcher.is_error() and matcher.get_error().startswith("NoExtensionBias")


def _grammar(structure: StructuredOutputs) -> str:
    """Raises ValueError for a schema or an EBNF that cannot be read, `SchemaError` for what cannot be enforced."""
    if structure.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS)
    if isinstance(structure.json, str):
        schema, options = _enforced(structure.json)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    if structure.regex is not None:
        return LLMatcher.grammar_from_regex(with_ascii_classes(structure.regex))
    if structure.choice is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in structure.choice)
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
    assert structure.grammar is not None
    if is_ebnf(structure.grammar):
        return LLMatcher.grammar_from_lark(ebnf_as_lark(structure.grammar))
    check_finite(lark_rules(structure.grammar))
    return LLMatcher.grammar_from_lark(with_schemas(structure.grammar, _schema_in_lark))


def _enforced(text: str) -> tuple[dict[str, Any], "JsonCompileOptions"]:
    """A schema as llguidance enforces it, with its options."""
    schema = normalized_text(text)
    return dict(schema.schema), {**_JSON_OPTIONS, "json_allowed_escapes": schema.escapes}


def _schema_in_lark(text: str) -> str:
    """A schema that stands in a grammar: of the options that come with it, only separators are its own to choose."""
    schema, options = _enforced(text)
    written = json.loads(text)
    asked = written.get("x-guidance") if isinstance(written, dict) else None
    own = {name: asked[name] for name in _SEPARATORS if name in asked} if isinstance(asked, dict) else {}
    return json.dumps({**schema, "x-guidance": {**options, **own}}, ensure_ascii=False)
