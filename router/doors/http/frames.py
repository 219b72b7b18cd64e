"""Frames: what stands around the text of an event that says nothing else, made once for all events of a choice.

What may not live here: what events say (`chat_completions.py`, `completions.py`).
"""

import json
from typing import Final, TypeAlias

Frame: TypeAlias = tuple[bytes, bytes]
"""What is before the text, as JSON, and what is behind."""

PLACE: Final = "\x00place of the text\x00"
"""Stands for the text. No model, id or fingerprint contains it."""

json_text: Final = json.encoder.encode_basestring
"""As `json.dumps` of a string, with `ensure_ascii=False`."""


def frame_of(event: bytes) -> Frame:
    """That of an event whose text is `PLACE`."""
    before, after = event.split(json_text(PLACE).encode())
    return before, after
