"""Token table: the bytes of each token of one tokenizer, and their spelling as text.

A token's bytes are its contribution in the middle of a text: the space before a word stays, and a part of a character
is its own bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

_LETTERS: Final = ("a", "e", "A", "1", "▁a", "Ġa")


class _Codec(Protocol):
    vocab_size: int

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_id(self, token: str) -> int | None: ...

    def token(self, token_id: int) -> str | None: ...


class TokenTable:
    """Table of one vocabulary. Thread-safe: it only caches."""

    def __init__(self, codec: _Codec, fallback_bytes: Mapping[int, int]) -> None:
        """`fallback_bytes`: the byte of each byte-fallback token (`token_table.py`)."""
        self._codec = codec
        self._fallback = fallback_bytes
        self._known: dict[int, bytes] = {}
        self._is_byte_level: bool | None = None
        self._anchor: tuple[list[int], str] | None = None

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes that the token adds to a text; empty for an id that the tokenizer does not know. Cached."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes_of(token_id)
        return known

    def text_of(self, token_id: int) -> str:
        """The same as text. Bytes that are no whole character are written as `\\xf0`."""
        return self.bytes_of(token_id).decode(errors="backslashreplace")

    def name_of(self, token_id: int) -> str:
        """Like `text_of`; bytes that are written out have `bytes:` before them, as in OpenAI's completions."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + data.decode(errors="backslashreplace")

    def piece_of(self, token_id: int) -> str:
        """The token as the vocabulary writes it (`Ġworld`, `▁world`, `<0x0A>`)."""
        return self._codec.token(token_id) or ""

    def distinct_names(self, token_ids: Iterable[int]) -> dict[int, str]:
        """A unique name for each token: `name_of`, or else all its bytes, or else its id."""
        names: dict[int, str] = {}
        taken: set[str] = set()
        for token_id in token_ids:
            if token_id in names:
                continue
            written = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token_id))
            choices = (self.name_of(token_id), written, f"token_id:{token_id}")
            names[token_id] = next(name for name in choices if name not in taken)
            taken.add(names[token_id])
        return names

    def _bytes_of(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._codec.vocab_size:
            return b""
        if (byte := self._fallback.get(token_id)) is not None:
            return bytes((byte,))
        if self._reads_bytes() and (piece := self._codec.token(token_id)) is not None:
            data = bytes_of_piece(piece)
            if data.decode(errors="replace") == self._codec.decode([token_id], False):
                return data
        before, text = self._context()
        whole = self._codec.decode([*before, token_id], False)
        if not whole.startswith(text):
            whole, text = self._codec.decode([token_id], False), ""
        return whole[len(text) :].encode(errors="replace")

    def _reads_bytes(self) -> bool:
        """Whether characters of the vocabulary stand for bytes, as in byte-level BPE."""
        if self._is_byte_level is None:
            space = self._codec.token_id("Ġ")
            self._is_byte_level = space is not None and self._codec.decode([space], False) == " "
        return self._is_byte_level

    def _context(self) -> tuple[list[int], str]:
        """A token to stand before another one, and its text: decoders drop spaces at the beginning of a text."""
        if self._anchor is None:
            found = (self._codec.token_id(letter) for letter in _LETTERS)
            candidates = [[token_id] for token_id in found if token_id is not None]
            candidates += [[token_id] for token_id in range(min(self._codec.vocab_size, 2000))]
            texts = ((ids, self._codec.decode(ids, False)) for ids in candidates)
            self._anchor = next(((ids, text) for ids, text in texts if text.strip().isalnum()), ([], ""))
        return self._anchor


def bytes_of_piece(piece: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; a token with other characters is text."""
    try:
        return bytes(_BYTES[character] for character in piece)
    except KeyError:
        return piece.encode(errors="replace")


def _byte_characters() -> dict[str, int]:
    """Byte-level BPE writes printable bytes of Latin-1 as themselves, and the others as characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES: Final = _byte_characters()


REPLACEMENT: Final = "\ufffd"
"""Character that decoders write for bytes that are not, or not yet, a character."""

_LETTER: Final = 0x41  # byte of "A"
_NEVER: Final = 0xFF
"""A byte that never occurs in UTF-8."""


class _Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...


class _RunCodec(_Decoder, Protocol):
    def token_id(self, token: str) -> int | None: ...


def fallback_bytes(codec: _RunCodec) -> Mapping[int, int]:
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
