"""Tool calls as Gemma 4 writes them: bare keys, and text between marks of its own.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,units:{wind:<|"|>m/s<|"|>}}<tool_call|>
"""

import json
import re
from typing import Final

from holdfast.router.tools.call_events import MAX_NAME, Emit, Malformed, Reading, TextSource
from holdfast.router.tools.call_parser import ToolCallParser
from holdfast.router.tools.json_reader import IS_SCALAR, ignore, pass_space, read_string, written

QUOTE: Final = '<|"|>'
"""Stands before and after a text, which has no escapes."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_KEY: Final = re.compile(r"[^\s:,{}\[\]<>\"]+")
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z]+")
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_CLOSERS: Final = {"{": "}", "[": "]"}


class Gemma4CallParser(ToolCallParser):
    """Each call stands between markers, after text or before it."""

    MARKERS = ("<|tool_call>",)
    CLOSINGS = ("<tool_call|>",)

    def _read_calls(self, opening: str) -> Reading[None]:
        yield from pass_space(self._source, ignore)
        yield from self._source.expect("call:")
        name = (yield from self._source.take_until("{", MAX_NAME)).strip()
        if not _NAME.fullmatch(name):
            raise Malformed
        self._begin(name)
        yield from read_arguments(self._source, self._pass_arguments)
        self._end()
        yield from pass_space(self._source, ignore)
        yield from self._source.pass_over("<tool_call|>")


def read_arguments(source: TextSource, emit: Emit) -> Reading[None]:
    """Reads an object whose opening bracket has been read, with its end. Raises `Malformed` at the first character that
    cannot stand there. It keeps its own stack: no output is nested too deeply for it.
    """
    emit("{")
    closers, wanted = ["}"], "first"
    while closers:
        yield from pass_space(source, ignore)
        char = yield from source.peek()
        if char == closers[-1] and wanted in ("first", "more"):
            source.position += 1
            emit(closers.pop())
            wanted = "more"
        elif wanted == "more":
            yield from source.expect(",")
            wanted = "next"
        elif closers[-1] == "}" and wanted != "value":
            key = yield from _read_key(source)
            emit(f"{', ' if wanted == 'next' else ''}{written(key)}: ")
            wanted = "value"
        else:
            if wanted == "next":
                emit(", ")
            wanted = yield from _read_value(source, emit, char, closers)


def _read_key(source: TextSource) -> Reading[str]:
    if (yield from source.peek()) == QUOTE[0]:
        yield from source.expect(QUOTE)
        key = yield from source.take_until(QUOTE, MAX_NAME)
    else:
        key = yield from source.take_all(_KEY)
    yield from pass_space(source, ignore)
    yield from source.expect(":")
    if not key:
        raise Malformed
    return key


def _read_value(source: TextSource, emit: Emit, char: str, closers: list[str]) -> Reading[str]:
    """Reads a text, a number or a word, or an opening bracket; returns the expected next item."""
    if char in _CLOSERS:
        source.position += 1
        closers.append(_CLOSERS[char])
        emit(char)
        return "first"
    if char == '"':  # as JSON has it
        yield from read_string(source, emit)
    elif char == QUOTE[0]:
        yield from source.expect(QUOTE)
        emit('"')
        yield from source.pass_until(QUOTE, lambda text: emit(written(text)[1:-1]))
        emit('"')
    else:
        emit(_scalar((yield from source.take_all(_SCALAR))))
    return "more"


def _scalar(text: str) -> str:
    word = _WORDS.get(text, text)
    if IS_SCALAR.fullmatch(word):
        return word
    try:
        return json.dumps(float(text), allow_nan=False)
    except ValueError:
        raise Malformed from None
