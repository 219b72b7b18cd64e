"""A model's tokenizer as llguidance reads it, for routers, which check grammars, and replicas, which follow them.

Text that a grammar asks for is written by plain tokens: llguidance by itself takes a forced text such as `<filename>`,
where the tokenizer has a special token of that name, for the special token, which matches no text, and the output is at
a dead end. What may not live here: grammars, and masks.
"""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def grammar_tokenizer(path: Path, eos_token_ids: Collection[int] | None = None) -> "LLTokenizer":
    """From a tokenizer.json. Takes a second where it is large. `eos_token_ids` of None: none need to be right, as where
    a grammar is only checked. Raises ValueError if llguidance does not support the tokenizer.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    text = path.read_text(encoding="utf-8")
    ends = None if eos_token_ids is None else sorted(eos_token_ids)
    as_it_is = LLTokenizer(text, eos_token=ends, slices=[])
    wrapper = TokenizerWrapper(_PlainEncoder(text, as_it_is))
    return LLTokenizer(wrapper, eos_token=ends or list(as_it_is.eos_tokens))


class _PlainEncoder:
    """What llguidance asks of a tokenizer that it does not read by itself."""

    bos_token_id = None

    def __init__(self, text: str, vocabulary: "LLTokenizer") -> None:
        """`vocabulary` knows the bytes of each token."""
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = range(vocabulary.vocab_size)
        self.eos_token_id = vocabulary.eos_token
        self.tokens = [vocabulary.decode_bytes([token_id]) for token_id in ids]
        self.special_token_ids = [token_id for token_id in ids if vocabulary.is_special_token(token_id)]

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text, which name no special token."""
        if not isinstance(text, str):
            raise TypeError("texts only")
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
