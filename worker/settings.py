"""Settings as groups of values: their base, the bounds of all numbers, and values as flags and files write them."""

import json
from typing import Annotated, Any, Final, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(value: object) -> object:
    """`"2GiB"`, `"512MB"` or a plain number, as a number of bytes. Other values are left to the validator."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().removesuffix("b")
    digits = text.rstrip("kmgi")
    unit = text[len(digits) :]
    if unit not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write it like 512MiB or 2GB")
    try:
        return int(digits) * _UNITS[unit] if digits.isdecimal() else int(float(digits) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a size; write it like 512MiB or 2GB") from None


DTYPE_SPELLINGS: Final = {
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
    "float16": "float16",
    "half": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
"""Names of the types that models are served in, as settings and checkpoints write them."""

MAX_WHOLE: Final = 2**31 - 1
"""The largest integer of a setting without a bound: the largest that every protocol and native struct carries."""

MAX_BYTES: Final = 2**63 - 1

MAX_FIGURE: Final = 1e9
"""The largest of other numbers: 31 years of seconds. A thread cannot wait for more than ten times this."""

MAX_RANKS: Final = 1024
"""Ranks of a replica: more than any model has heads that they could share."""

MAX_THREADS: Final = 4096  # of one rank

Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(le=MAX_BYTES)]


def parse_shares(value: object) -> object:
    """`"gold=4,free=0.5"` as a mapping. Other values are left to the validator."""
    if not isinstance(value, str):
        return value
    pairs = [pair.rpartition("=") for pair in value.split(",") if pair.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(f"{value!r} names no shares; write it like gold=4,free=0.5")
    return {name.strip(): share for name, _, share in pairs}


TenantShares = Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], BeforeValidator(parse_shares)]


def parse_json(value: object) -> object:
    """The text of a JSON object as a mapping. Other values are left to the validator."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is not JSON: {error}") from None


JsonObject = Annotated[dict[str, Any], BeforeValidator(parse_json)]


def parse_folders(value: object) -> object:
    """`NAME=PATH,NAME=PATH` as a mapping. Other values are left to the validator."""
    if not isinstance(value, str):
        return value
    pairs = [item.partition("=") for item in value.split(",") if item.strip()]
    if wrong := next((name for name, equals, path in pairs if not (equals and name.strip() and path.strip())), None):
        raise ValueError(f"{wrong!r}: each must be NAME=PATH")
    return {name.strip(): path.strip() for name, _, path in pairs}


Folders = Annotated[dict[str, str], BeforeValidator(parse_folders)]


def parse_names(value: object) -> object:
    """`NAME,NAME` as a list. Other values are left to the validator."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(parse_names)]


class Settings(BaseModel):
    """A group of settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: object, about: ValidationInfo) -> object:
        """Raises `ValueError` for a number beyond that."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return value
        assert about.field_name is not None, "it is a field's validator"
        most = MAX_WHOLE if isinstance(value, int) else MAX_FIGURE
        if value > most and not _is_bounded(cls.model_fields[about.field_name]):
            raise ValueError(f"must be at most {most:.0f}")
        return value


def _is_bounded(kind: Any) -> bool:
    """Whether a field, or a type in it, has an upper bound."""
    if isinstance(kind, FieldInfo):
        return any(hasattr(one, "le") or hasattr(one, "lt") for one in kind.metadata) or _is_bounded(kind.annotation)
    return any(_is_bounded(one) for one in get_args(kind))
