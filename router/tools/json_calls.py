"""Tool calls written as JSON: the formats of Hermes and Qwen, Llama 3, Mistral, DeepSeek V3 and Kimi K2."""

import json
import re
from typing import ClassVar, Final

from holdfast.router.tools.call_events import MAX_NAME, Malformed, Reading
from holdfast.router.tools.call_parser import ToolCallParser
from holdfast.router.tools.json_reader import ignore, pass_space, read_json, read_text

_ARGUMENTS: Final = ("arguments", "parameters")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_NUMBER: Final = re.compile(r":\d+$")


class JsonCallParser(ToolCallParser):
    """Shared part of JSON formats: an object with a name and arguments, in any order, and bare arguments."""

    MAY_LACK_ARGUMENTS: ClassVar[bool] = True
    """Whether an object with a name alone is a call, with no arguments."""

    def _read_object(self) -> Reading[None]:
        """Reads `{"name": ..., "arguments": ...}`. Other members are passed over, and so is a missing brace."""
        name: str | None = None
        arguments: list[str] | None = None
        is_reported = False
        yield from self._source.expect("{")
        yield from self._skip_space()
        while not (yield from self._source.take("}")):
            key = yield from self._read_key()
            if key == "name" and name is None:
                name = yield from read_text(self._source)
            elif key in _ARGUMENTS and not is_reported and name is not None:
                yield from self._read_arguments_of(name)
                is_reported = True
            elif key in _ARGUMENTS and arguments is None:
                arguments = yield from self._held_arguments()
            else:
                yield from read_json(self._source, ignore)
            if name is not None and arguments is not None and not is_reported:
                self._report(name, "".join(arguments))
                is_reported = True
            yield from self._skip_space()
            if (yield from self._source.take(",")):
                yield from self._skip_space()
            elif is_reported and (yield from self._source.peek()) != "}":
                return
        if not is_reported:
            if not name or not self.MAY_LACK_ARGUMENTS:
                raise Malformed
            self._report(name, "{}")

    def _read_arguments_of(self, name: str) -> Reading[None]:
        """Reports a call whose arguments come next."""
        if not name:
            raise Malformed
        if (yield from self._source.peek()) == "{":
            self._begin(name)
            yield from read_json(self._source, self._pass_arguments)
            self._end()
        else:
            self._report(name, "".join((yield from self._held_arguments())))

    def _held_arguments(self) -> Reading[list[str]]:
        """Arguments that cannot be passed on yet. Some models write them as text, or null for none."""
        pieces: list[str] = []
        char = yield from self._source.peek()
        if char == '"':
            text = yield from read_text(self._source)
            pieces = [text]
        else:
            yield from read_json(self._source, pieces.append)
        if pieces == ["null"]:
            return ["{}"]
        if char != "{" and not (char == '"' and _is_object(pieces[0])):
            raise Malformed
        return pieces

    def _read_key(self) -> Reading[str]:
        key = yield from read_text(self._source)
        yield from self._skip_space()
        yield from self._source.expect(":")
        yield from self._skip_space()
        return key

    def _report(self, name: str, arguments: str) -> None:
        if not name:
            raise Malformed
        self._begin(name)
        self._pass_arguments(arguments)
        self._end()

    def _read_list(self) -> Reading[None]:
        """Reads `[{...}, ...]`, of which the bracket at the end may be missing."""
        yield from self._source.expect("[")
        yield from self._skip_space()
        while True:
            yield from self._read_object()
            yield from self._skip_space()
            if not (yield from self._source.take(",")):
                break
            yield from self._skip_space()
        yield from self._source.take("]")

    def _skip_space(self) -> Reading[None]:
        yield from pass_space(self._source, ignore)


class HermesCallParser(JsonCallParser):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one after another."""

    MARKERS = ("<tool_call>",)
    CLOSINGS = ("</tool_call>",)

    def _read_calls(self, opening: str) -> Reading[None]:
        yield from self._skip_space()
        yield from self._read_object()
        yield from self._skip_space()
        yield from self._source.pass_over("</tool_call>")


class LlamaCallParser(JsonCallParser):
    """`{"name": "f", "parameters": {...}}` in a separate line or after `<|python_tag|>`; a `;` separates calls."""

    MARKERS = ("<|python_tag|>",)
    BARE = "{"
    BARE_IN_EVERY_LINE = True
    MAY_LACK_ARGUMENTS = False  # an answer in JSON may have a name, too

    def _read_calls(self, opening: str) -> Reading[None]:
        yield from self._skip_space()
        yield from self._read_object()
        yield from self._skip_space()
        yield from self._source.take(";")


class MistralCallParser(JsonCallParser):
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, or of newer models `[TOOL_CALLS]f[ARGS]{...}`."""

    MARKERS = ("[TOOL_CALLS]",)

    def _read_calls(self, opening: str) -> Reading[None]:
        yield from self._skip_space()
        char = yield from self._source.peek()
        if char == "[":
            yield from self._read_list()
        elif char == "{":
            yield from self._read_object()
        else:
            yield from self._read_named()

    def _read_named(self) -> Reading[None]:
        name = yield from self._source.take_all(_NAME)
        if (yield from self._source.take("[CALL_ID]")):
            yield from self._source.take_all(_NAME)
        yield from self._source.take("[ARGS]")
        yield from self._skip_space()
        yield from self._read_arguments_of(name)


class DeepSeekCallParser(JsonCallParser):
    """Calls of DeepSeek V3 and V3.1 between special markers. V3 writes the arguments as a block of code."""

    MARKERS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    CLOSINGS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

    def _read_calls(self, opening: str) -> Reading[None]:
        if opening == self.MARKERS[0]:
            yield from self._skip_space()
            yield from self._source.expect(self.MARKERS[1])
        name = (yield from self._source.take_until("<｜tool▁sep｜>", MAX_NAME)).strip()
        if name == "function" and (yield from self._source.peek()) != "{":
            name = (yield from self._source.take_until("\n", MAX_NAME)).strip()
        yield from self._source.pass_over("```json")
        yield from self._skip_space()
        yield from self._read_arguments_of(name)
        for end in ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"):
            yield from self._skip_space()
            yield from self._source.pass_over(end)


KIMI_SECTION, KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiCallParser(JsonCallParser):
    """Calls of Kimi K2, in a separate section. A call's id has its name: `functions.f:0`, the number counted over the
    conversation.
    """

    MARKERS = (KIMI_SECTION, KIMI_CALL)
    CLOSINGS = (KIMI_CALL_END, KIMI_SECTION_END)

    def _read_calls(self, opening: str) -> Reading[None]:
        if opening == KIMI_SECTION:
            yield from self._skip_space()
            yield from self._source.expect(KIMI_CALL)
        call_id = (yield from self._source.take_until(KIMI_ARGUMENTS, MAX_NAME)).strip()
        name = _NUMBER.sub("", call_id.removeprefix("functions."))
        yield from self._skip_space()
        yield from self._read_arguments_of(name)
        for end in self.CLOSINGS:
            yield from self._skip_space()
            yield from self._source.pass_over(end)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
