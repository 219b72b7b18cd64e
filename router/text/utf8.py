"""UTF-8 of tokens that end within characters, decoded as the Unicode standard has it."""

import codecs
from typing import Any, Final

_FIRST_BYTE: Final = 0xED  # of three, of a surrogate
_SECOND_FROM: Final = 0xA0  # its second byte is this or more


class Utf8Decoder(codecs.BufferedIncrementalDecoder):
    """Python's incremental decoder, but that it does not wait for the third byte of a surrogate (ED A0 to ED BF), which
    is no character whatever follows: "two ill-formed sequences" (Unicode 16, table 3-8), as tokenizers decode it.
    """

    def _buffer_decode(self, data: Any, errors: str, final: bool) -> tuple[str, int]:
        text, num_read = codecs.utf_8_decode(data, errors, final)
        left = bytes(data[num_read:])
        if len(left) == 2 and left[0] == _FIRST_BYTE and left[1] >= _SECOND_FROM:
            return codecs.utf_8_decode(data, errors, True)
        return text, num_read
