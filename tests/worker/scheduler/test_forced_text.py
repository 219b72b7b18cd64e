"""Text that a grammar forces is written to its last byte, whatever a tokenizer puts before a text's first word."""

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

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


SETTINGS = {
    "tokenizer_config.json": {"added_tokens_decoder": {"9999": {"content": "[MARK]", "special": True}}},
    "generation_config.json": {"eos_token_id": 1},
}


@pytest.mark.parametrize("text", ["<|turn|>", "a[MARK]b", "</s>", '["<|turn|>", "[MARK]", "</s>"]'])
@pytest.mark.parametrize("ends", [None, [1]])
def test_forced_text_spells_no_token_that_only_the_settings_call_special(text: str, ends: list[int], tmp_path: Path):
    """As where tokenizer.json says `special: false` of the end of a turn."""
    known = sample_tokenizers.byte_level()
    known.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<|turn|>", "[MARK]")])
    described = json.loads(known.to_str())
    for token in described["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    for name, settings in SETTINGS.items():
        (tmp_path / name).write_text(json.dumps(settings))
    tokenizer = grammar_tokenizer(tmp_path / "tokenizer.json", ends)
    names = ("<|turn|>", "[MARK]", "</s>")
    single = {known.token_to_id(name) for name in names}
    assert None not in single
    written = tokenizer.tokenize_str(text)
    assert not single & set(written)
    assert b"".join(tokenizer.decode_bytes([one]) for one in written) == text.encode()
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(f"start: {json.dumps(text)}"))
    assert matcher.consume_tokens(written)
    assert matcher.is_accepting()
