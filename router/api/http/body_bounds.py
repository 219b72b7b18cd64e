"""Static bounds of JSON bodies, and of JSON in other messages, by field: one table for all, from `LimitsConfig`.

A field that is not in it has those of `OTHER`, so that none is without.
"""

from typing import Final

from holdfast.router.config import LimitsConfig
from holdfast.router.wire.json_bounds import JsonBounds
from holdfast.worker.wire.bound import Bound

_OTHER_COUNT, _OTHER_SIZE = 4096, 256 * 2**10
OTHER: Final = Bound(count=_OTHER_COUNT, size=_OTHER_SIZE)
"""Bound of a field without one of its own."""

_ESCAPED: Final = 6
"""Bytes of JSON that stand for one byte of text at most."""

_VALUE_BYTES: Final = 2
"""Characters of JSON that a value takes at least, with the comma or the bracket after it."""

_AROUND: Final = 256
"""Values around a shape: its name and options."""

_ID_BYTES: Final = 12
"""Bytes of a token id with comma and space."""


def body_bounds(limits: LimitsConfig) -> JsonBounds:
    """Bounds by field of a body."""
    text = _ESCAPED * limits.max_prompt_bytes
    values = 16 * limits.max_messages
    chat = Bound(count=values, size=text + 64 * values, setting="limits.max_messages, limits.max_prompt_bytes")
    tokens = Bound(
        count=limits.max_prompt_tokens + 2048,
        size=max(text, _ID_BYTES * limits.max_prompt_tokens) + _OTHER_SIZE,
        setting="limits.max_prompt_tokens, limits.max_prompt_bytes",
    )
    grammar = Bound(
        count=max(limits.max_grammar_length // _VALUE_BYTES, limits.max_choices) + _AROUND,
        size=_ESCAPED * limits.max_grammar_length + _OTHER_SIZE,
        setting="limits.max_grammar_length",
    )
    allowed = Bound(
        count=limits.max_allowed_token_ids,
        size=_ID_BYTES * limits.max_allowed_token_ids,
        setting="limits.max_allowed_token_ids",
    )
    bias = Bound(count=limits.max_logit_bias, size=64 * limits.max_logit_bias + 64, setting="limits.max_logit_bias")
    fields = {
        "prompt": Bound(count=2048, size=text + _OTHER_SIZE, setting="limits.max_prompt_bytes"),
        **dict.fromkeys(("messages", "input", "items", "system", "instructions", "tools", "documents"), chat),
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), grammar),
        **dict.fromkeys(("response_format", "structured_outputs", "guided_decoding", "text"), grammar),
        **dict.fromkeys(("output_config", "output_format"), grammar),
        "chat_template_kwargs": Bound(count=OTHER.count, size=text),
        "logit_bias": bias,
        "stop_token_ids": Bound(count=limits.max_stop_token_ids, size=OTHER.size, setting="limits.max_stop_token_ids"),
        **dict.fromkeys(("stop", "stop_sequences"), _texts(limits.max_stop_strings, limits.max_stop_string_length)),
        "bad_words": _texts(limits.max_bad_words, limits.max_bad_word_length),
    }
    whole = Bound(count=limits.max_prompt_tokens + limits.max_allowed_token_ids + 2 * values)
    lists = {**dict.fromkeys(("prompt", "tokens", "input"), tokens), "allowed_token_ids": allowed}
    return JsonBounds(fields, OTHER, whole, string=text, lists=lists)


def _texts(count: int, length: int) -> Bound:
    return Bound(count=count + 16, size=2 * _ESCAPED * count * length + 1024)
