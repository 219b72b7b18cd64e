"""Tool calls written as a list of Python calls: `[get_weather(city="Paris"), now()]`."""

import json
import re
from typing import Final

from holdfast.router.tools.call_events import Malformed, Reading
from holdfast.router.tools.call_parser import ToolCallParser
from holdfast.router.tools.json_reader import ignore, pass_space
from holdfast.router.tools.python_reader import read_literal

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
