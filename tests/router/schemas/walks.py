"""Seeded walks: outputs drawn at random of the tokens that a grammar allows, without a model."""

import random
from pathlib import Path
from typing import Final, NamedTuple

from llguidance import LLMatcher

from holdfast.router.text.grammar import GrammarCompiler
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.grammar_matchers import grammar_tokenizer
from holdfast.worker.structured_outputs import StructuredOutputs

BUNDLED: Final = Path(__file__).parents[3] / "cluster/bundled_model/model"
_ENDS: Final = (b'"', b"}", b"]", b",", b":")


class Walk(NamedTuple):
    end: str
    """`done`; `length`, where it was given up; or else what went wrong."""
    text: str


class Walker:
    """Over the tokens of the bundled model."""

    def __init__(self, folder: Path = BUNDLED) -> None:
        tokenizer = Tokenizer.load(str(folder))
        assert tokenizer.json_path is not None
        self._compiler = GrammarCompiler(tokenizer)
        self._tokens = grammar_tokenizer(tokenizer.json_path)

    def compile(self, **wish: object) -> str:
        """Raises `InvalidRequestError`."""
        return self._compiler.compile(StructuredOutputs(**wish))  # type: ignore[arg-type]  # as from any caller

    def walk(self, grammar: str, seed: int, max_tokens: int = 300) -> Walk:
        """After some tokens it takes those that end something, where it can."""
        rng, matcher, token_ids = random.Random(seed), LLMatcher(self._tokens, grammar, log_level=0), list[int]()
        end = "length"
        while len(token_ids) < max_tokens and not matcher.is_stopped():
            allowed = self._allowed(matcher)
            has_end = matcher.is_accepting()
            if matcher.is_error() or not (allowed or has_end):
                end = f"dead end: {matcher.get_error()[:100]}"
                break
            if not allowed or (has_end and rng.random() < 0.5):
                end = "done"
                break
            if len(token_ids) > 30:
                allowed = [token_id for token_id in allowed if self._bytes(token_id)[:1] in _ENDS] or allowed
            token_id = rng.choice(allowed)
            matcher.consume_token(token_id)
            token_ids.append(token_id)
        if matcher.is_stopped():
            end = "done" if matcher.is_accepting() else f"stopped: {matcher.get_error()[:100]}"
        return Walk(end, b"".join(map(self._bytes, token_ids)).decode(errors="replace"))

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether the text is a whole output of the grammar."""
        matcher, token_ids = LLMatcher(self._tokens, grammar, log_level=0), self._tokens.tokenize_str(text)
        is_read = matcher.validate_tokens(token_ids) == len(token_ids) and matcher.consume_tokens(token_ids)
        return is_read and matcher.is_accepting()

    def _allowed(self, matcher: LLMatcher) -> list[int]:
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        ends = set(self._tokens.eos_tokens)
        return [i for i in range(self._tokens.vocab_size) if bits >> i & 1 and i not in ends]

    def _bytes(self, token_id: int) -> bytes:
        return self._tokens.decode_bytes([token_id])
