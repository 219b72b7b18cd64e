"""Checks of single values that callers fill in: their types, and fields of vLLM's requests that are not supported.

Of those, values that ask for nothing are taken, and others are refused by name. The tables of vLLM's classes are here;
bodies of HTTP requests add to them what only bodies have.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import wraps
from numbers import Integral, Real
from typing import Any, Final, Self, TypeGuard, TypeVar

from holdfast.worker.errors import InvalidRequestError


def is_whole(value: object) -> TypeGuard[int]:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_number(value: object) -> TypeGuard[float]:
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def is_flag(value: object) -> TypeGuard[bool]:
    return isinstance(value, bool)


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is text that UTF-8 can write: half a surrogate pair is no character."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_float(value: Any) -> float:
    """The value as a float; infinite beyond a float's range."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Bytes are excluded: to Python they are a sequence of integers, as a prompt they are a mistake."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def checked_prompt(value: object) -> str | tuple[int, ...]:
    """Text, or token ids as plain integers. Raises `InvalidRequestError`."""
    if isinstance(value, str):
        return checked_text("text", value)
    if not is_list(value):
        raise InvalidRequestError("prompt", value, "must be text or a list of token ids")
    return checked_token_ids("token_ids", value)


_PIECE: Final = 2**16  # token ids


def checked_token_ids(field: str, value: object) -> tuple[int, ...]:
    """The ids as plain integers, whatever type they have. Raises `InvalidRequestError`."""
    if not is_list(value):
        raise InvalidRequestError(field, value, "must be a list of token ids")
    token_ids = tuple(value)
    if _are_plain(token_ids):
        return token_ids  # type: ignore[return-value]  # the common case
    return tuple(_checked_token_id(field, item) for item in token_ids)


def _are_plain(token_ids: tuple[object, ...]) -> bool:
    """Whether all are plain integers. Checked at the speed of C, but in pieces: checking a million at once would block
    all other threads for 40 ms.
    """
    for start in range(0, len(token_ids), _PIECE):  # noqa: SIM110  # a generator costs a request half a microsecond
        if not set(map(type, token_ids[start : start + _PIECE])) <= {int}:
            return False
    return True


def _checked_token_id(field: str, value: object) -> int:
    if not is_whole(value):
        raise InvalidRequestError(field, value, "token ids must be whole numbers")
    return int(value)


def checked_text(field: str, value: object) -> str:
    """Raises `InvalidRequestError` for a value that is not text, or has half a surrogate pair, which no encoding can
    write.
    """
    if not isinstance(value, str):
        raise InvalidRequestError(field, value, "must be text")
    if not is_text(value):
        raise InvalidRequestError(field, value, "must be valid Unicode: surrogates not allowed")
    return value


def checked_seconds(field: str, value: object) -> float | None:
    """The seconds as a plain number; None is no limit. Raises `InvalidRequestError` for a value that is not a
    number.
    """
    if value is not None and (not is_number(value) or value != value):
        raise InvalidRequestError(field, value, "must be a number of seconds")
    return None if value is None else as_float(value)


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
    "disable_any_whitespace": (False, True, None),  # there is none here in any case
    "disable_additional_properties": (False, None),
    "whitespace_pattern": (None,),
    "structural_tag": (None,),
    "backend": (None,),
    "disable_fallback": (False, None),
}


def check_neutral(name: str, value: object, values: tuple[object, ...], field: str = "") -> None:
    """Raises `InvalidRequestError` for a value other than the neutral ones. `field` is put before the name in the
    message.
    """
    if any(type(value) is type(one) and value == one for one in values):
        return
    wish = " or ".join(repr(one) for one in values if one is not None)
    limit = f"must be {wish}: any other value is not supported" if wish else "is not supported"
    raise InvalidRequestError(f"{field}{name}", value, limit)


_MAX_NAME: Final = 64
"""Characters of an unknown field's name in an error."""


def check_names(given: Mapping[str, object], known: Collection[str], at: str, notes: Collection[str] = ()) -> None:
    """Raises `InvalidRequestError` for a field of the object `at` that is neither known nor one of the `notes`, which
    have no effect. Null counts as absent.
    """
    for name, value in given.items():
        if name not in known and name not in notes and value is not None:
            limit = f"is not known; known are: {', '.join(known)}"
            raise InvalidRequestError(f"{at}.{str(name)[:_MAX_NAME]}", value, limit)


def takes_neutral(table: Neutral, field: str) -> Callable[[type[Owner]], type[Owner]]:
    """A class whose constructor also takes the fields of `table`, with their neutral values.

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


set_slot: Final = object.__setattr__
"""Sets an attribute without the checks of a class's own `__setattr__`."""


class RequestOutputKind(Enum):
    """Content of a stream's outputs, by vLLM's names. Here the call says it: see `SamplingParams`."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class OutputKind:
    """vLLM's `output_kind`, kept beside the parameters: no token depends on it."""

    __slots__ = ("_output_kind",)
    _output_kind: RequestOutputKind | None
    """None until the constructor has set all parameters."""

    def __new__(cls, *_: object, **__: object) -> Self:
        made = object.__new__(cls)
        set_slot(made, "_output_kind", None)
        return made

    def _set_output_kind(self, kind: object) -> None:
        if not isinstance(kind, RequestOutputKind):
            raise InvalidRequestError("sampling_params.output_kind", kind, "must be a RequestOutputKind")
        set_slot(self, "_output_kind", kind)

    @property
    def wanted_output_kind(self) -> RequestOutputKind:
        """The `output_kind` that was given."""
        assert self._output_kind is not None, "it is there since the constructor"
        return self._output_kind
