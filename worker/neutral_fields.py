"""Fields of vLLM's requests that are not supported: values that ask for nothing are taken, others are refused by name.

The tables of vLLM's classes are here; bodies of HTTP requests add to them what only bodies have.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, TypeVar

from holdfast.worker.errors import InvalidRequestError

Neutral = Mapping[str, tuple[object, ...]]
"""A field's name, and the values that change nothing; the first is vLLM's default."""

Owner = TypeVar("Owner")

SAMPLING_FIELDS: Final[Neutral] = {
    "watermarking": (None, False),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None,),
    "flat_logprobs": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (None,),
    "skip_clone": (False, True),  # a request always has its own copy
    "output_text_buffer_length": (0,),
    "extra_args": (None, {}),
    "skip_reading_prefix_cache": (None, False),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (0,),
    "trace_decode_token_ids": (None,),
    "logits_processors": (None, []),
}

STRUCTURE_FIELDS: Final[Neutral] = {
    "disable_any_whitespace": (False, None),
    "disable_additional_properties": (False, None),
    "whitespace_pattern": (None,),
    "structural_tag": (None,),
    "backend": (None,),
    "disable_fallback": (False, None),
}


def check_neutral(name: str, value: object, values: tuple[object, ...], field: str = "") -> None:
    """Raises `InvalidRequestError` for a value that asks for something. `field` comes before the name in its words."""
    if any(type(value) is type(one) and value == one for one in values):
        return
    wish = " or ".join(repr(one) for one in values if one is not None)
    limit = f"must be {wish}: what else it asks for is not supported" if wish else "is not supported"
    raise InvalidRequestError(f"{field}{name}", value, limit)


def takes_neutral(table: Neutral, field: str) -> Callable[[type[Owner]], type[Owner]]:
    """A class whose constructor also takes the fields of `table`, with the values that ask for nothing.

    They are not stored: an instance reads as vLLM's default.
    """

    def extended(cls: type[Owner]) -> type[Owner]:
        constructor = cls.__init__

        @wraps(constructor)
        def __init__(self: Owner, *arguments: Any, **given: Any) -> None:
            for name in table.keys() & given.keys():
                check_neutral(name, given.pop(name), table[name], field)
            constructor(self, *arguments, **given)

        cls.__init__ = __init__  # type: ignore[method-assign, assignment]  # the one place
        for name, values in table.items():
            setattr(cls, name, values[0])
        return cls

    return extended
