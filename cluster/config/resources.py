"""Ray's custom resources as settings: how amounts of them are written, and which are refused.

What may not live here: Ray, and where anything runs (`placement.py`).
"""

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field

COUNTED_ELSEWHERE: Final = ("CPU", "GPU", "memory", "object_store_memory")
LEAST: Final = 0.0001
"""The smallest part of a resource that Ray counts."""


def _read(value: object) -> object:
    """`"fast_disk=1,accelerator_type:H100=0.001"` as a mapping. Other values are left to the validator."""
    if not isinstance(value, str):
        return value
    pairs = [pair.rpartition("=") for pair in value.split(",") if pair.strip()]
    if not all(name.strip() for name, _, _ in pairs):
        raise ValueError(f"{value!r} names no resources; write it like fast_disk=1,accelerator_type:H100=0.001")
    return {name.strip(): amount for name, _, amount in pairs}


def _check(value: Mapping[str, float]) -> Mapping[str, float]:
    for name in value:
        if name in COUNTED_ELSEWHERE:
            raise ValueError(f"{name} is no custom resource: only those that nodes were given by name can be asked for")
    return value


Amount = Annotated[float, Field(ge=LEAST, allow_inf_nan=False)]
CustomResources = Annotated[dict[str, Amount], BeforeValidator(_read), AfterValidator(_check)]
"""Amounts by name, as in `ray start --resources`. Ray adds some of its own, such as `accelerator_type:H100`."""
