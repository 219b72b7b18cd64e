"""Numbers of a JSON schema: bounds and constants that the grammar of numbers keeps exactly; others are refused.

llguidance holds bounds and constants in floating point, and writes integers of 64 bits: an integer beyond 2**53, or a
number of more than 15 digits, would come out as its neighbour.
"""

import math
from decimal import Decimal
from typing import Any, Final

from holdfast.router.schemas.places import SchemaError

_EXACT: Final = 2**53  # whole numbers up to it are exact in float64
_LARGEST: Final = 2**63 - 1024
"""The largest integer of 64 bits that floating point has."""
_DIGITS: Final = 15
"""Significant digits that survive being read into floating point and written again."""

_NEXT_TO_0: Final = 1e-15  # stands for an exclusive bound of 0

LOWER: Final = ("minimum", "exclusiveMinimum")
UPPER: Final = ("maximum", "exclusiveMaximum")


def check_exact(value: Any, path: str) -> None:
    """Raises `SchemaError` for a constant with a number that cannot be reproduced exactly."""
    if isinstance(value, list):
        for item in value:
            check_exact(item, path)
    elif isinstance(value, dict):
        for item in value.values():
            check_exact(item, path)
    elif isinstance(value, int | float) and not isinstance(value, bool) and not _is_exact(value):
        limit = f"{value} cannot be enforced exactly: integers must be within 2**53, other numbers have 15 digits"
        raise SchemaError(path, value, limit)


def normalize_bounds(schema: dict[str, Any], path: str) -> None:
    """Rewrites `minimum`, `maximum`, their exclusive forms and `multipleOf` so that they are exact.

    Raises `SchemaError` where they cannot be. That no number is within them is for llguidance to see: then a branch of
    `anyOf`, or an optional property, matches nothing, and the rest does.
    """
    for keyword in (*LOWER, *UPPER, "multipleOf"):
        if keyword in schema and not _is_bound(schema[keyword], keyword):
            raise SchemaError(f"{path}.{keyword}", schema[keyword], "must be a finite number")
    for inclusive, exclusive in (LOWER, UPPER):
        _without_flag(schema, inclusive, exclusive)
    if schema.get("type") == "integer":
        _whole_bounds(schema)
    _without_excluded_zero(schema)
    for keyword in (*LOWER, *UPPER):
        if keyword in schema:
            schema[keyword] = _exact_bound(schema[keyword], f"{path}.{keyword}", is_lower=keyword in LOWER)
    if "multipleOf" in schema:
        _normalize_step(schema, path)


def _is_bound(value: Any, keyword: str) -> bool:
    if isinstance(value, bool):
        return keyword.startswith("exclusive")  # draft 4
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _without_flag(schema: dict[str, Any], inclusive: str, exclusive: str) -> None:
    """Converts draft 4, in which a flag says that a bound is exclusive."""
    if isinstance(schema.get(exclusive), bool):
        is_exclusive = schema.pop(exclusive)
        if is_exclusive and inclusive in schema:
            schema[exclusive] = schema.pop(inclusive)


def _whole_bounds(schema: dict[str, Any]) -> None:
    """Bounds of integers as inclusive integers."""
    lowest = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    lowest += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    highest = [math.floor(schema["maximum"])] if "maximum" in schema else []
    highest += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    for keyword in (*LOWER, *UPPER):
        schema.pop(keyword, None)
    if lowest:
        schema["minimum"] = max(lowest)
    if highest:
        schema["maximum"] = min(highest)


def _without_excluded_zero(schema: dict[str, Any]) -> None:
    """llguidance lets 0 in where it is excluded from a range that ends before 1, or begins after -1."""
    if schema.get("exclusiveMinimum") == 0 and min(_ends(schema, UPPER), default=1) < 1:
        del schema["exclusiveMinimum"]
        schema["minimum"] = max(schema.get("minimum", 0), _NEXT_TO_0)
    if schema.get("exclusiveMaximum") == 0 and max(_ends(schema, LOWER), default=-1) > -1:
        del schema["exclusiveMaximum"]
        schema["maximum"] = min(schema.get("maximum", 0), -_NEXT_TO_0)


def _ends(schema: dict[str, Any], keywords: tuple[str, str]) -> list[float]:
    return [schema[keyword] for keyword in keywords if keyword in schema]


def _exact_bound(value: Any, path: str, *, is_lower: bool) -> Any:
    """The bound itself, or for a number of many digits the nearest of 15 digits that lies within.

    A bound beyond the numbers that are written anyway, such as 64-bit integers, becomes the last of these numbers.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST:
        value = int(value)
    if isinstance(value, int):
        points_out = value < 0 if is_lower else value > 0
        if points_out and abs(value) > _LARGEST:
            return -_LARGEST if is_lower else _LARGEST
        if not _is_exact(value):
            raise SchemaError(path, value, f"{value} cannot be enforced exactly: integers must be within 2**53")
        return value
    if abs(value) > _LARGEST:
        if (value < 0) == is_lower:
            return -_LARGEST if is_lower else _LARGEST
        raise SchemaError(path, value, f"{value} cannot be enforced: numbers are written up to 2**63")
    return value if _is_exact(value) else _rounded_inward(value, is_lower=is_lower)


def _rounded_inward(value: float, *, is_lower: bool) -> float:
    rounded = float(f"{value:.{_DIGITS - 1}e}")
    step = 10.0 ** (math.floor(math.log10(abs(value))) - _DIGITS + 1)
    if is_lower and rounded < value:
        rounded = float(f"{rounded + step:.{_DIGITS - 1}e}")
    if not is_lower and rounded > value:
        rounded = float(f"{rounded - step:.{_DIGITS - 1}e}")
    return rounded


def _is_exact(value: float) -> bool:
    if isinstance(value, int):
        return abs(value) <= _EXACT or (abs(value) <= _LARGEST and int(float(value)) == value)
    if not math.isfinite(value) or (value.is_integer() and abs(value) > _LARGEST):
        return False  # beside `type: integer` llguidance writes the last of 64 bits, or overflows its stack
    return len(Decimal(repr(value)).normalize().as_tuple().digits) <= _DIGITS


def _normalize_step(schema: dict[str, Any], path: str) -> None:
    step = schema["multipleOf"]
    if step <= 0:
        raise SchemaError(f"{path}.multipleOf", step, "must be more than 0")
    if not _is_exact(step) or step > _EXACT:
        raise SchemaError(f"{path}.multipleOf", step, "cannot be enforced exactly: it has too many digits")
    if isinstance(step, float) and step.is_integer():
        schema["multipleOf"] = step = int(step)
