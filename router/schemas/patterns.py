"""Patterns and formats of strings: a regex of ECMA-262 as llguidance reads it, and the regexes of formats.

`\\d` and `\\w` are ASCII, as in ECMA-262. `.`, `\\s`, `\\D`, `\\W` are narrow, so that all languages' validators agree.

Objects have patterns of names. A grammar can count declared names, but not names that a pattern or
`additionalProperties` admits: it cannot detect a duplicate among these.
"""

import json
import logging
from functools import lru_cache
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from holdfast.router.schemas.places import SchemaError

logger = logging.getLogger(__name__)

_SPACE: Final = r"\t\n\x0B\x0C\r\x20\u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}"
_ANY_SPACE: Final = _SPACE + r"\x1C-\x1F\u{85}\u{FEFF}"
_WORD: Final = r"\p{L}\p{M}\p{N}_"
_OUTSIDE: Final = {
    ".": r"[^\n\r\u{2028}\u{2029}]",
    r"\s": f"[{_SPACE}]",
    r"\S": f"[^{_ANY_SPACE}]",
    r"\W": f"[^{_WORD}]",
    r"\D": r"[^\p{Nd}]",
}
_ASCII_INSIDE: Final = {r"\d": "0-9", r"\w": "0-9A-Za-z_"}
_ASCII: Final = {token: f"[{text}]" for token, text in _ASCII_INSIDE.items()} | {
    token.upper(): f"[^{text}]" for token, text in _ASCII_INSIDE.items()
}
_INSIDE: Final = {"[": r"\[", "&": r"\&", "~": r"\~", r"\s": _SPACE, r"\b": r"\x08"}

_DAY: Final = (
    r"(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-"
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_ATOM: Final = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_LABEL: Final = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,14}"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL}){{0,7}}"
FORMATS: Final = {
    "date": f"^{_DAY}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DAY}T{_TIME}$",
    "email": rf"^{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}$",
    "hostname": f"^{_HOST}$",
}
"""Formats that llguidance takes wider than calendars and the lengths of names do."""
_FEW: Final = 64
"""Texts of a pattern that are counted one by one."""
_MAX_STEPS: Final = 1000

_KNOWN_FORMATS: Final = frozenset({"duration", "ipv4", "ipv6", "uuid", "uri"})


def normalize_strings(schema: dict[str, Any], path: str) -> None:
    """Rewrites `pattern` and `format`. Raises `SchemaError` for a pattern that cannot be enforced."""
    if "pattern" in schema:
        schema["pattern"] = checked_pattern(schema["pattern"], f"{path}.pattern")
    if "format" in schema:
        _normalize_format(schema, f"{path}.format")


def checked_pattern(pattern: Any, path: str) -> str:
    """The pattern in llguidance's syntax. Raises `SchemaError` if there is none."""
    if not isinstance(pattern, str):
        raise SchemaError(path, pattern, "must be a regular expression")
    written = _as_rust(pattern, path)
    if error := _error_of(written):
        raise SchemaError(path, pattern, f"cannot be enforced: {error}")
    return written


def _normalize_format(schema: dict[str, Any], path: str) -> None:
    """JSON Schema treats formats as annotations, so an unknown format has no effect."""
    name = schema["format"]
    if not isinstance(name, str):
        raise SchemaError(path, name, "must be a text")
    if name in FORMATS:
        del schema["format"]
        if "pattern" in schema:
            schema.setdefault("allOf", []).append({"pattern": FORMATS[name]})
        else:
            schema["pattern"] = FORMATS[name]
    elif name not in _KNOWN_FORMATS:
        del schema["format"]
        _warn_of_format(name[:64])


@lru_cache(maxsize=64)
def _warn_of_format(name: str) -> None:
    """Once for each name."""
    known = ", ".join(sorted({*FORMATS, *_KNOWN_FORMATS}))
    logger.warning("format %r of JSON schemas is not enforced; enforced are %s", name, known)


def _as_rust(pattern: str, path: str) -> str:
    """Tokens of ECMA-262 that Rust's regexes read otherwise are rewritten."""
    written, position, is_inside, is_negated = [], 0, False, False
    while position < len(pattern):
        size = 2 if pattern[position] == "\\" else 1
        token = pattern[position : position + size]
        if is_inside and pattern.startswith("--", position):
            raise SchemaError(path, pattern, "cannot be enforced: a range that ends in -- is not supported")
        if is_inside and token == r"\S":
            raise SchemaError(path, pattern, r"cannot be enforced: \S within brackets is not supported")
        if is_inside and token in (r"\D", r"\W") and not is_negated:
            raise SchemaError(path, pattern, f"cannot be enforced: {token} within brackets is not supported")
        is_start = token == "[" and not is_inside
        written.append(token if is_start else (_INSIDE if is_inside else _OUTSIDE).get(token, token))
        position += size
        is_inside = is_start or (is_inside and token != "]")
        if is_start:
            is_negated = pattern.startswith("^", position)
        if is_start and is_negated:
            written.append("^")
            position += 1
    return "".join(written)


def with_ascii_classes(regex: str) -> str:
    """A regex of Rust whose `\\d` and `\\w` are ASCII, and `\\D` and `\\W`, outside of brackets, what is not."""
    written, position, is_inside = [], 0, False
    while position < len(regex):
        size = 2 if regex[position] == "\\" else 1
        token = regex[position : position + size]
        is_start = token == "[" and not is_inside
        written.append((_ASCII_INSIDE if is_inside else _ASCII).get(token, token))
        position += size
        is_inside = is_start or (is_inside and token != "]")
        if is_start and regex.startswith(("]", "^]"), position):  # a bracket that stands first is a character
            length = 2 if regex[position] == "^" else 1
            written.append(regex[position : position + length])
            position += length
    return "".join(written)


@lru_cache(maxsize=1024)
def _error_of(pattern: str) -> str:
    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, None)
    return messages[0].replace("\n", " ") if is_error else ""


@lru_cache(maxsize=1024)
def matches(pattern: str, text: str) -> bool:
    """Whether a checked pattern is found in the text."""
    both = {"allOf": [{"type": "string", "pattern": pattern}, {"const": text}]}
    is_error, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(both), None)
    return not (is_error and "Unsatisfiable" in messages[0])


@lru_cache(maxsize=1024)
def only_matches(pattern: str) -> tuple[str, ...] | None:
    """The texts that a checked pattern is found in, if they are few; else None."""
    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    found: list[str] = []
    open_ends = [(LLMatcher(_byte_tokenizer(), grammar, log_level=0), b"")]
    for _ in range(_MAX_STEPS):
        if not open_ends:
            return tuple(sorted(found))
        matcher, text = open_ends.pop()
        if text.endswith(b'"') and matcher.is_accepting():
            found.append(json.loads(text))
        if matcher.is_stopped() and matcher.is_accepting():
            continue
        following = _allowed(matcher)
        if len(found) > _FEW or len(following) + len(open_ends) > _MAX_STEPS:
            return None
        for byte in following:
            branch = matcher.deep_copy()
            branch.consume_token(byte)
            open_ends.append((branch, text + bytes((byte,))))
    return None


def _allowed(matcher: LLMatcher) -> list[int]:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return [] if matcher.is_error() else [byte for byte in range(256) if mask >> byte & 1]


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    """One token for each byte."""
    return LLTokenizer("byte")


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
