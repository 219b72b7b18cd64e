"""UTF-8 of tokens that end within characters, decoded as the Unicode standard has it."""

import codecs
from typing import Any

_FIRST_OF_SURROGATES = 0xED
_SURROGATES_FROM = 0xA0


class Utf8Decoder(codecs.BufferedIncrementalDecoder):
    """Python's incremental decoder, but that it does not wait for the third byte of a surrogate (ED A0 to ED BF), which
    is no character whatever follows: "two ill-formed sequences" (Unicode 16, table 3-8), as tokenizers decode it.
    """

    def _buffer_decode(self, data: Any, errors: str, final: bool) -> tuple[str, int]:
        text, num_read = codecs.utf_8_decode(data, errors, final)
        left = bytes(data[num_read:])
        if len(left) == 2 and left[0] == _FIRST_OF_SURROGATES and left[1] >= _SURROGATES_FROM:
            return codecs.utf_8_decode(data, errors, True)
        return text, num_read
