"""Incremental reader of Python literals: passes a value on as JSON, as it comes."""

import ast
import json
import re
from typing import Final

from holdfast.router.tools.call_events import Emit, Malformed, Reading, TextSource
from holdfast.router.tools.json_reader import IS_SCALAR, ignore, pass_space, written

_PLAIN: Final = {quote: re.compile(rf"[^{quote}\\\n]+") for quote in "'\""}
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z_]+")
_WORDS: Final = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSERS: Final = {"{": "}", "[": "]", "(": ")"}
_SIMPLE: Final[dict[str, str]] = dict(zip("\n\\'\"abfnrtv", ("", "\\", "'", '"', *"\a\b\f\n\r\t\v"), strict=True))
"""What a backslash and a character stand for."""
_CODE_LENGTHS: Final = {"x": 2, "u": 4, "U": 8}
_MAX_SCALAR: Final = 1000


def read_literal(source: TextSource, emit: Emit) -> Reading[None]:
    """Reads one value, without the spaces after it: text, a number, True, False, None, a list, a tuple or a dictionary.

    Raises `Malformed` at the first character that cannot stand there.
    """
    closers: list[str] = []
    wanted = "value"
    while True:
        yield from pass_space(source, ignore)
        char = yield from source.peek()
        if closers and char == closers[-1] and wanted != "value":
            source.position += 1
            emit("}" if closers.pop() == "}" else "]")
            wanted = "more"
        elif wanted == "more":
            yield from source.expect(",")
            wanted = "next"
        else:
            if wanted == "next":
                emit(", ")
            if closers and closers[-1] == "}" and wanted != "value":
                yield from _read_key(source, emit)
                wanted = "value"
            elif char in _CLOSERS:
                source.position += 1
                closers.append(_CLOSERS[char])
                emit("{" if char == "{" else "[")
                wanted = "first"
            else:
                yield from _read_single(source, emit)
                wanted = "more"
        if wanted == "more" and not closers:
            return


def _read_key(source: TextSource, emit: Emit) -> Reading[None]:
    yield from _read_text(source, emit)
    yield from pass_space(source, ignore)
    yield from source.expect(":")
    emit(": ")


def _read_single(source: TextSource, emit: Emit) -> Reading[None]:
    char = yield from source.peek()
    if char in ("'", '"'):
        return (yield from _read_text(source, emit))
    scalar = yield from source.take_all(_SCALAR)
    emit(_WORDS.get(scalar) or _number(scalar))


def _number(scalar: str) -> str:
    if IS_SCALAR.fullmatch(scalar):
        return scalar
    try:
        value = ast.literal_eval(scalar) if len(scalar) <= _MAX_SCALAR else None
        if type(value) not in (int, float):
            raise Malformed
        return json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise Malformed from None


def _read_text(source: TextSource, emit: Emit) -> Reading[None]:
    """Reads text in single or double quotes."""
    quote = yield from source.peek()
    if quote not in _PLAIN:
        raise Malformed
    source.position += 1
    emit('"')
    while char := (yield from source.peek()):
        if run := source.take_run(_PLAIN[quote]):
            emit(written(run)[1:-1])
            continue
        source.position += 1
        if char == quote:
            return emit('"')
        text = (yield from _read_escape(source)) if char == "\\" else char
        emit(written(text)[1:-1])
    raise Malformed


def _read_escape(source: TextSource) -> Reading[str]:
    """A backslash that begins no escape stands for itself, as in Python."""
    char = yield from source.peek()
    if not char:
        raise Malformed
    if char in _SIMPLE:
        source.position += 1
        return _SIMPLE[char]
    length = _CODE_LENGTHS.get(char, 0)
    while len(source.text) - source.position < length + 1 and not source.has_ended:
        yield
    code = source.text[source.position + 1 : source.position + 1 + length]
    if not length or not re.fullmatch(f"[0-9a-fA-F]{{{length}}}", code) or int(code, 16) > 0x10FFFF:
        return "\\"
    source.position += 1 + length
    return chr(int(code, 16))
