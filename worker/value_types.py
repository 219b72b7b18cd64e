"""Type checks of single values, for fields that callers fill in."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

from holdfast.worker.errors import InvalidRequestError


def is_whole(value: object) -> TypeGuard[int]:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_number(value: object) -> TypeGuard[float]:
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def is_flag(value: object) -> TypeGuard[bool]:
    return isinstance(value, bool)


def is_text(value: object) -> TypeGuard[str]:
    """It is text, and UTF-8 can write it: half a surrogate pair is no character."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_float(value: Any) -> float:
    """What is beyond a float's range becomes infinite."""
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


def checked_token_ids(field: str, value: object) -> tuple[int, ...]:
    """As plain integers, whatever kind they come in. Raises `InvalidRequestError`."""
    if not is_list(value):
        raise InvalidRequestError(field, value, "must be a list of token ids")
    token_ids = tuple(value)
    if set(map(type, token_ids)) <= {int}:
        return token_ids  # type: ignore[return-value]  # the common case, at the speed of C
    return tuple(_checked_token_id(field, item) for item in token_ids)


def _checked_token_id(field: str, value: object) -> int:
    if not is_whole(value):
        raise InvalidRequestError(field, value, "token ids must be whole numbers")
    return int(value)


def checked_text(field: str, value: object) -> str:
    """Raises `InvalidRequestError` for what is no text, or has half a surrogate pair, which no encoding can write."""
    if not isinstance(value, str):
        raise InvalidRequestError(field, value, "must be text")
    if not is_text(value):
        raise InvalidRequestError(field, value, "must be valid Unicode: surrogates not allowed")
    return value


def checked_seconds(field: str, value: object) -> float | None:
    """As a plain number; None is no limit. Raises `InvalidRequestError` for what is no number."""
    if value is not None and (not is_number(value) or value != value):
        raise InvalidRequestError(field, value, "must be a number of seconds")
    return None if value is None else as_float(value)
