"""Text that a grammar forces is written to its last byte, whatever a tokenizer puts before a text's first word."""

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher

from holdfast.worker.grammar_matchers import grammar_tokenizer
from tests.router import sample_tokenizers


def bits(mask: bytes) -> list[int]:
    return [8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]


TEXTS = [
    " the fox",
    "the fox",
    "the  fox",
    '{"a": [1, "quick"]}',
    "日本 👍",
    "<s> is text",
    "<[105]> is text",
    "\ufffd",
]
"""That of `gemma` has a token of its own for the last, the largest id, and no token of id 105."""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma"])
@pytest.mark.parametrize("text", TEXTS)
def test_what_a_grammar_forces_is_written_whole(kind: str, text: str, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    known = getattr(sample_tokenizers, kind)()
    known.save(str(path))
    tokenizer = grammar_tokenizer(path, [1])
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(f"start: {json.dumps(text, ensure_ascii=False)}"))
    written: list[int] = []
    while not matcher.is_stopped():
        fitting = bits(matcher.compute_bitmask())
        assert not matcher.is_error(), matcher.get_error()
        assert all(known.id_to_token(token_id) is not None for token_id in fitting), "an id without a token"
        written.append(min(fitting, key=lambda token_id: -len(tokenizer.decode_bytes([token_id]))))
        assert matcher.consume_token(written[-1])
    assert b"".join(tokenizer.decode_bytes([one]) for one in written if one != 1) == text.encode()
