"""Tool call parser, as far as formats agree: content, places where calls may begin, and the handling of malformed
calls.

A call is reported once its name is known and its arguments begin; until then its text is held back. If it goes wrong
before that, its text is content; after that the call ends, incomplete, and the rest is content. White space before the
first call, between calls and after the last one is dropped, and so are tags that end calls, whole or cut off, and the
head of a further call that is cut off.
"""

import re
from abc import ABC, abstractmethod
from typing import ClassVar, Final

from holdfast.router.tools.call_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallEvent,
    Content,
    CutOff,
    Malformed,
    Reading,
    TextSource,
    held_back,
    merged,
)

_INDENT: Final = " \t\r"


class ToolCallParser(ABC):
    """Tells content from calls in one output. The merged events do not depend on how the text is cut into pieces."""

    MARKERS: ClassVar[tuple[str, ...]] = ()
    """Texts that begin a call wherever they stand. None begins another."""
    CLOSINGS: ClassVar[tuple[str, ...]] = ()
    """Texts that end a call, or a part of one. After the first call they are no content wherever they stand."""
    IN_THOUGHTS: ClassVar[str] = ""
    """Opening of a call that also ends the reasoning it stands in; empty: none."""
    BARE: ClassVar[str] = ""
    """A character that begins a call as the first one of a line, or of the output; none."""
    BARE_IN_EVERY_LINE: ClassVar[bool] = False
    """Whether `BARE` does so in every line; else only before any content, and after a call."""

    def __init__(self) -> None:
        self._source = TextSource()
        self._events: list[CallEvent] = []
        self._num_calls = 0
        self._has_open_call = False
        self._space: str | None = ""
        """White space since the start or the last call; None once there was content."""
        self._is_line_blank = True
        self._reader = self._read()
        next(self._reader)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    def push(self, text: str) -> list[CallEvent]:
        """Events that are certain now."""
        if text:
            self._source.push(text)
            next(self._reader)
        return self._taken()

    def finish(self) -> list[CallEvent]:
        """Events held back until the output's end."""
        self._source.has_ended = True
        next(self._reader, None)
        return self._taken()

    @abstractmethod
    def _read_calls(self, opening: str) -> Reading[None]:
        """Reads the calls after a marker, or from `BARE` on if `opening` is empty. Raises `Malformed`."""

    def _begin(self, name: str) -> None:
        self._space = None
        self._has_open_call = True
        self._events.append(CallBegin(self._num_calls, name))
        self._num_calls += 1
        self._source.settle()

    def _pass_arguments(self, json: str) -> None:
        if json:
            self._events.append(CallArguments(self._num_calls - 1, json))
        self._source.settle()

    def _end(self, is_complete: bool = True) -> None:
        self._source.settle()
        self._has_open_call = False
        self._space, self._is_line_blank = "", True
        self._events.append(CallEnd(self._num_calls - 1, is_complete))

    def _taken(self) -> list[CallEvent]:
        events, self._events = self._events, []
        return merged(events)

    def _read(self) -> Reading[None]:
        while (opening := (yield from self._read_content())) is not None:
            if opening in self.CLOSINGS:
                self._source.settle()
                continue
            try:
                yield from self._read_calls(opening)
                self._source.settle()
            except Malformed as error:
                self._give_up(error)
        if self._space and not self._num_calls:
            self._events.append(Content(self._space))

    def _give_up(self, error: Malformed) -> None:
        """Turns the text of a malformed call into content. Reading goes on at the character that was wrong.

        If the output breaks off within arguments, held-back text belongs to them. Where it does so in the head
        of a further call, that is dropped.
        """
        source = self._source
        rest, tail = source.settle(), source.text[source.position :]
        is_tag = source.has_ended and (not tail or any(text.startswith(tail) for text in self._tags()))
        has_broken_off = is_tag or isinstance(error, CutOff)
        if has_broken_off and (self._has_open_call or self._is_after_call()):
            source.position = len(source.text)
            source.settle()
            if self._has_open_call:
                self._pass_arguments(rest)
            rest = ""
        if self._has_open_call:
            self._end(is_complete=False)
        self._release(rest)

    def _read_content(self) -> Reading[str | None]:
        """The marker that comes next, which is read, or "" for a bare opening, which is not; None at the end."""
        source = self._source
        while True:
            start, opening = self._opening()
            num_held = 0
            if opening is None and not (source.has_ended and not self._num_calls):
                num_held = held_back(source.text[source.position :], self._tags())
            source.position = start - num_held
            self._release(source.settle())
            if source.has_ended and num_held:
                source.position = start
                tail = source.settle()
                self._release("" if num_held > 1 or self._is_after_call() else tail)
            if opening is not None:
                source.position += len(opening)
                return opening
            if source.has_ended:
                return None
            yield

    def _tags(self) -> tuple[str, ...]:
        """Tags searched for in content."""
        return (*self.MARKERS, *self.CLOSINGS) if self._num_calls else self.MARKERS

    def _is_after_call(self) -> bool:
        """There was no content since the last call."""
        return self._num_calls > 0 and self._space is not None

    def _opening(self) -> tuple[int, str | None]:
        """Position and text of the first opening, or after a call of a closing; the end of the text and None without
        one.
        """
        text, position = self._source.text, self._source.position
        found = [(start, marker) for marker in self._tags() if (start := text.find(marker, position)) >= 0]
        if self.BARE and text.find(self.BARE, position) >= 0 and (start := self._bare_opening()) >= 0:
            found.append((start, ""))
        return min(found) if found else (len(text), None)

    def _bare_opening(self) -> int:
        """Position of a line that begins with `BARE`; -1: none."""
        text, position = self._source.text, self._source.position
        if self.BARE_IN_EVERY_LINE:
            before = (r"(?:\A|\n)" if self._is_line_blank else r"\n") + f"[{_INDENT}]*"
        elif self._space is None:
            return -1
        else:
            before = r"\A\s*"
        found = re.search(before + re.escape(self.BARE), text[position:])
        return -1 if found is None else position + found.end() - 1

    def _release(self, text: str) -> None:
        """Content. White space waits until it is known whether a call or content follows."""
        if not text:
            return
        _, line_end, line = text.rpartition("\n")
        self._is_line_blank = not line.strip(_INDENT) and (bool(line_end) or self._is_line_blank)
        if self._space is not None and not text.strip():
            self._space += text
            return
        self._events.append(Content((self._space or "") + text))
        self._space = None
