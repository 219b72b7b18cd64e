"""Makes grammars of structured outputs, and refuses what cannot be enforced, and outputs that break them, before a
replica hears of it.

What may not live here: masks, which are the worker's business. A grammar travels as text, in llguidance's own format.
"""

import json
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from llguidance import LLMatcher, LLTokenizer

from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.structured_outputs import FIELD, StructuredOutputs

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON_OPTIONS: Final["JsonCompileOptions"] = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
"""Free whitespace lets a model write blanks for ever; leniency would drop what cannot be enforced in silence."""


class GrammarCompiler:
    """Compiles for one model. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._path = tokenizer.json_path

    def compile(self, structure: StructuredOutputs | None) -> str:
        """The grammar of a structure; empty for none. May take a second for the first of a model, or for a very large one.

        Raises `InvalidRequestError`, naming the field, where the structure cannot be enforced, here or at all.
        """
        if structure is None:
            return ""
        field = f"{FIELD}.{structure.kind}"
        try:
            grammar = _grammar(structure)
        except ValueError as error:
            raise InvalidRequestError(field, structure.text, f"cannot be read: {error}") from None
        self._check(grammar, field, structure.text, None)
        if self._path is None:
            raise InvalidRequestError(FIELD, structure.kind, "is not possible here: the model has no tokenizer.json")
        self._check(grammar, field, structure.text, self._tokenizer)
        return grammar

    def check_output(self, field: str, grammar: str, token_ids: Sequence[int], eos_token_ids: Collection[int]) -> None:
        """Raises `InvalidRequestError` for `field` if no output that matches a compiled grammar begins with the tokens.

        The last one may be an end of sequence, where the grammar is fulfilled.
        """
        has_ended = bool(token_ids) and token_ids[-1] in eos_token_ids
        rest = list(token_ids[:-1] if has_ended else token_ids)
        known = list(takewhile(lambda token_id: token_id < self._tokenizer.vocab_size, rest))
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        num_right = matcher.validate_tokens(known)
        if matcher.is_error():
            return  # it is too much to be followed so far: a replica ends such an output early
        is_right = num_right == len(rest)
        if is_right and has_ended:
            is_right = matcher.consume_tokens(rest) and matcher.is_accepting()
        if not is_right:
            limit = f"token {num_right} cannot stand there: the output must match {FIELD}"
            raise InvalidRequestError(field, token_ids[num_right], limit)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """What a replica will build from the same file, so that no request can be its first to fail."""
        assert self._path is not None
        try:
            return LLTokenizer(self._path.read_text(encoding="utf-8"))
        except ValueError as error:
            limit = f"is not possible with this model's tokenizer: {error}"
            raise InvalidRequestError(FIELD, self._path.name, limit) from None

    def _check(self, grammar: str, field: str, text: str, tokenizer: LLTokenizer | None) -> None:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
        if is_error:
            raise InvalidRequestError(field, text, f"cannot be enforced: {'; '.join(messages)}")


def _grammar(structure: StructuredOutputs) -> str:
    """Raises ValueError for a schema that is no JSON object."""
    if structure.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS)
    if isinstance(structure.json, str):
        return LLMatcher.grammar_from_json_schema(structure.json, overrides=_JSON_OPTIONS)
    if structure.regex is not None:
        return LLMatcher.grammar_from_regex(structure.regex)
    if structure.choice is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in structure.choice)
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
    assert structure.grammar is not None
    return LLMatcher.grammar_from_lark(structure.grammar)
