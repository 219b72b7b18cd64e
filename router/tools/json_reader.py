"""Incremental JSON reader: passes on the text of a value as it comes, and stops at the value's end.

It repairs frequent errors of models within strings, raw control characters and unknown escapes, so that its output is
JSON.
"""

import json
import re
from typing import Final

from holdfast.router.tools.call_events import SPACE, Emit, Malformed, Reading, TextSource
from holdfast.worker.value_types import is_text

_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z]+")
IS_SCALAR: Final = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX: Final = re.compile(r"[0-9a-fA-F]{4}")
_MAYBE_SPACE: Final = ("", " ", "\n", "\t", "\r")
_CLOSERS: Final = {"{": "}", "[": "]"}


def read_json(source: TextSource, emit: Emit) -> Reading[None]:
    """Reads one value, without the spaces after it. Raises `Malformed` at the first character that cannot stand there.

    It keeps its own stack: no output is nested too deeply for it.
    """
    closers: list[str] = []
    wanted = "value"
    while True:
        if (char := source.next_character) in _MAYBE_SPACE:
            yield from pass_space(source, emit)
            char = yield from source.peek()
        if closers and char == closers[-1] and wanted in ("first", "more"):
            _pass(source, emit)
            closers.pop()
            wanted = "more"
        elif wanted == "more":
            if char != ",":
                raise Malformed
            _pass(source, emit)
            wanted = "key" if closers[-1] == "}" else "value"
        elif wanted == "key" or (wanted == "first" and closers[-1] == "}"):
            yield from read_string(source, emit)
            yield from pass_space(source, emit)
            yield from _expect(source, ":", emit)
            wanted = "value"
        elif char in _CLOSERS:
            _pass(source, emit)
            closers.append(_CLOSERS[char])
            wanted = "first"
        else:
            yield from (read_string if char == '"' else _read_scalar)(source, emit)
            wanted = "more"
        if wanted == "more" and not closers:
            return


def read_string(source: TextSource, emit: Emit) -> Reading[None]:
    """Reads a string with its quotes."""
    yield from _expect(source, '"', emit)
    while char := source.next_character or (yield from source.peek()):
        if run := source.take_run(_PLAIN):
            emit(run)
        elif char == "\\":
            yield from _read_escape(source, emit)
        elif char == '"':
            return _pass(source, emit)
        else:
            source.position += 1
            emit(json.dumps(char)[1:-1])
    raise Malformed


def read_text(source: TextSource) -> Reading[str]:
    """Reads a whole string, and returns its value. Half a surrogate pair is malformed."""
    pieces: list[str] = []
    yield from read_string(source, pieces.append)
    text = str(json.loads("".join(pieces)))
    if not is_text(text):
        raise Malformed
    return text


def written(text: str) -> str:
    """A JSON string that says `text`. Half a surrogate pair, which no encoding can write, stays an escape."""
    return json.dumps(text, ensure_ascii=not is_text(text))


def pass_space(source: TextSource, emit: Emit) -> Reading[None]:
    """Reads white space and emits it unchanged."""
    if space := (yield from source.take_all(SPACE)):
        emit(space)


def ignore(text: str) -> None:
    """Ignores its input."""


def _read_escape(source: TextSource, emit: Emit) -> Reading[None]:
    """A backslash that begins no escape stands for itself."""
    source.position += 1
    char = yield from source.peek()
    if not char:
        raise Malformed
    if char == "u":
        source.position += 1
        yield from _read_code(source, emit)
    elif char in '"\\/bfnrt':
        source.position += 1
        emit("\\" + char)
    else:
        emit("\\\\")


def _read_code(source: TextSource, emit: Emit) -> Reading[None]:
    while len(source.text) - source.position < 4 and not source.has_ended:
        yield
    code = _HEX.match(source.text, source.position)
    if code is not None:
        source.position = code.end()
    emit("\\u" + code[0] if code else "\\\\u")


def _read_scalar(source: TextSource, emit: Emit) -> Reading[None]:
    scalar = yield from source.take_all(_SCALAR)
    if not IS_SCALAR.fullmatch(scalar):
        raise Malformed
    emit(scalar)


def _expect(source: TextSource, literal: str, emit: Emit) -> Reading[None]:
    yield from source.expect(literal)
    emit(literal)


def _pass(source: TextSource, emit: Emit) -> None:
    """Passes on the next character."""
    char = source.text[source.position]
    source.position += 1
    emit(char)
