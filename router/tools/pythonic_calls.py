"""Tool calls written as a list of Python calls: `[get_weather(city="Paris"), now()]`."""

import ast
import json
import re
from typing import Final

from holdfast.router.tools.call_events import Emit, Malformed, Reading, TextSource
from holdfast.router.tools.call_parser import ToolCallParser
from holdfast.router.tools.json_reader import IS_SCALAR, ignore, pass_space, written

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


class PythonicCallParser(ToolCallParser):
    """The list stands before any other text, as in Llama 3.2."""

    BARE = "["

    def _read_calls(self, opening: str) -> Reading[None]:
        yield from self._skip_space()
        yield from self._source.expect("[")
        yield from self._skip_space()
        while True:
            yield from self._read_call()
            yield from self._skip_space()
            if not (yield from self._source.take(",")):
                break
            yield from self._skip_space()
        yield from self._source.take("]")
        for closing in self.CLOSINGS:
            yield from self._skip_space()
            yield from self._source.pass_over(closing)

    def _read_call(self) -> Reading[None]:
        """The call begins when the name of an argument, or the end of an empty list of them, shows that it is one."""
        name = yield from self._source.take_all(_NAME)
        yield from self._source.expect("(")
        yield from self._skip_space()
        is_first = True
        while not (yield from self._source.take(")")):
            key = yield from self._read_key()
            if not name:
                raise Malformed
            if is_first:
                self._begin(name)
            self._pass_arguments(f"{'{' if is_first else ', '}{json.dumps(key)}: ")
            is_first = False
            yield from read_literal(self._source, self._pass_arguments)
            yield from self._skip_space()
            if (yield from self._source.take(",")):
                yield from self._skip_space()
            elif (yield from self._source.peek()) != ")":
                raise Malformed
        if is_first:
            if not name:
                raise Malformed
            self._begin(name)
        self._pass_arguments("{}" if is_first else "}")
        self._end()

    def _read_key(self) -> Reading[str]:
        key = yield from self._source.take_all(_NAME)
        yield from self._skip_space()
        yield from self._source.expect("=")
        if not key or (yield from self._source.peek()) == "=":
            raise Malformed
        return key

    def _skip_space(self) -> Reading[None]:
        yield from pass_space(self._source, ignore)


class Llama4CallParser(PythonicCallParser):
    """The list may stand between markers, and then after text."""

    MARKERS = ("<|python_start|>",)
    CLOSINGS = ("<|python_end|>",)


class Lfm2CallParser(PythonicCallParser):
    """The list stands between markers, after text or before it."""

    MARKERS = ("<|tool_call_start|>",)
    CLOSINGS = ("<|tool_call_end|>",)
    BARE = ""


_PLAIN: Final = {quote: re.compile(rf"[^{quote}\\\n]+") for quote in "'\""}
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z_]+")
_WORDS: Final = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSERS: Final = {"{": "}", "[": "]", "(": ")"}
_SIMPLE: Final[dict[str, str]] = dict(zip("\n\\'\"abfnrtv", ("", "\\", "'", '"', *"\a\b\f\n\r\t\v"), strict=True))
"""Characters that an escape with a backslash stands for."""
_CODE_LENGTHS: Final = {"x": 2, "u": 4, "U": 8}
_MAX_SCALAR: Final = 1000  # characters


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
