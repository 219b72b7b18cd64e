"""Byte fallback: runs of byte tokens, with which tokenizers spell characters that have no token.

Their decoders decode a run as a whole: a run that is valid UTF-8 becomes that text, else each of its bytes becomes
U+FFFD. So no text of a run is final while the run may still turn invalid. What may live here: finding byte tokens, and
the state of a run. What may not: other tokens, and when the text of a run is released (`detokenizer.py`).
"""

import codecs
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"
"""What decoders write for bytes that are not, or not yet, a character."""

_LETTER: Final = 0x41
_NEVER: Final = 0xFF
"""A byte that never occurs in UTF-8."""


class _Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...


class _Codec(_Decoder, Protocol):
    def token_id(self, token: str) -> int | None: ...


def fallback_bytes(codec: _Codec) -> Mapping[int, int]:
    """The byte of each byte token, by token id; empty if the tokenizer has none or decodes them one by one."""
    found = {codec.token_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    bytes_ = {token_id: byte for token_id, byte in found.items() if token_id is not None}
    ids = _token_ids(bytes_)
    if not {_LETTER, _NEVER} <= ids.keys():
        return {}
    is_spelled = codec.decode([ids[_LETTER]], False) == chr(_LETTER)
    breaks = codec.decode([ids[_LETTER], ids[_NEVER]], False) == 2 * REPLACEMENT
    return bytes_ if is_spelled and breaks else {}


def is_nothing(decoder: _Decoder, fallback: Mapping[int, int], token_id: int) -> bool:
    """Whether a token decodes to nothing and does not interrupt a run of byte tokens."""
    if decoder.decode([token_id], False):
        return False
    ids = _token_ids(fallback)
    return decoder.decode([ids[_LETTER], token_id, ids[_NEVER]], False) == 2 * REPLACEMENT


def _token_ids(fallback: Mapping[int, int]) -> dict[int, int]:
    return {byte: token_id for token_id, byte in fallback.items()}


class ByteRun:
    """The run of byte tokens at the end of the tokens so far. It may be empty."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.is_broken = False
        """Whether it is invalid UTF-8, whatever follows."""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    @property
    def is_whole(self) -> bool:
        """Whether it is valid and does not end within a character."""
        return not self.is_broken and not self._decoder.getstate()[0]

    def push(self, token_id: int, byte: int) -> str:
        """The characters completed by this byte. They change if the run turns invalid later."""
        if self.is_broken:
            return ""
        self.token_ids.append(token_id)
        try:
            return self._decoder.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self.is_broken = True
            return ""
