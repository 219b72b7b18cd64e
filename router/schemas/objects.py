"""Objects of a JSON schema: names that are declared and match patterns, and how many properties there are.

A grammar can count names that are declared, not those that a pattern or `additionalProperties` lets in: it cannot see
that one comes twice.
"""

from typing import Any, Final

from holdfast.router.schemas.patterns import checked_pattern, matches, only_matches
from holdfast.router.schemas.places import SchemaError

_MAX_PATTERNS: Final = 64  # patternProperties of one object
_MAX_LOOKS: Final = 4096
"""Names that are matched with patterns: each look takes a tenth of a millisecond."""


def normalize_object(schema: dict[str, Any], path: str) -> None:
    """Rewrites `patternProperties` so that no declared name matches one, and refuses counts for which
    equal names would have to be counted once. Raises `SchemaError`.
    """
    if isinstance(schema.get("patternProperties"), dict):
        _normalize_patterns(schema, path)
    _check_count(schema, path)


def _normalize_patterns(schema: dict[str, Any], path: str) -> None:
    """A declared name that matches a pattern follows the pattern's schema too, and a pattern of few names declares
    them: what llguidance leaves of a pattern without its declared names is never empty.
    """
    given = schema.pop("patternProperties")
    properties = dict(schema.get("properties", {}))
    patterns = {checked_pattern(key, f"{path}.patternProperties"): item for key, item in given.items()}
    few = {pattern: only_matches(pattern) for pattern in patterns}
    names = dict.fromkeys(
        [*properties, *schema.get("required", ()), *(name for texts in few.values() for name in texts or ())]
    )
    if len(names) * len(patterns) > _MAX_LOOKS or len(patterns) > _MAX_PATTERNS:
        limit = f"cannot be enforced: {len(patterns)} patterns and {len(names)} names are too many"
        raise SchemaError(f"{path}.patternProperties", None, limit)
    for name in names:
        parts = [item for pattern, item in patterns.items() if matches(pattern, name)]
        if parts:
            own = [properties[name]] if name in properties else []
            properties[name] = _all_of([*own, *parts])
    kept = {pattern: item for pattern, item in patterns.items() if few[pattern] is None}
    if properties:
        schema["properties"] = properties
    if kept:
        schema["patternProperties"] = kept


def _all_of(parts: list[Any]) -> Any:
    if False in parts:
        return False
    parts = [part for part in parts if part is not True and part != {}]
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def _check_count(schema: dict[str, Any], path: str) -> None:
    """Raises `SchemaError` where two names more than the required ones are needed: they might be one name twice."""
    fewest = schema.get("minProperties", 0)
    required = set(schema.get("required", ()))
    is_closed = schema.get("additionalProperties", True) is False and "patternProperties" not in schema
    if fewest > len(required) + 1 and not is_closed:
        limit = f"cannot be enforced: that {fewest - len(required)} further names differ cannot be seen; at most 1 can"
        raise SchemaError(f"{path}.minProperties", fewest, limit)
    if is_closed:
        _count_declared(schema, path)


def _count_declared(schema: dict[str, Any], path: str) -> None:
    """Counts that say nothing, or that all are needed, are written so: llguidance counts no optional ones."""
    names = [name for name, item in schema.get("properties", {}).items() if item is not False]
    fewest, required = schema.get("minProperties", 0), schema.get("required", [])
    if fewest > len(names):
        raise SchemaError(f"{path}.minProperties", fewest, f"only {len(names)} properties are possible")
    if fewest == len(names) and fewest:
        schema["required"] = [*dict.fromkeys([*required, *names])]
    if fewest in (0, len(names)) or fewest <= len(set(required)):
        schema.pop("minProperties", None)
    if schema.get("maxProperties", 0) >= len(names):
        schema.pop("maxProperties", None)
