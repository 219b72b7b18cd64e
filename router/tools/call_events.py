"""Tool call events: the output of a parser of a model's text, as plain data."""

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. Its arguments follow, then its end; calls do not overlap."""

    index: int
    """Counts the calls of one output, from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments. All pieces of a call that is complete make one JSON object."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ends. Without `is_complete` the output broke off, or went wrong, within the arguments."""

    index: int
    is_complete: bool = True


CallEvent: TypeAlias = Content | CallBegin | CallArguments | CallEnd


def merged(events: Iterable[CallEvent]) -> list[CallEvent]:
    """The same with adjacent pieces of content, and of one call's arguments, joined."""
    events = list(events)
    if len(events) == 1:
        return events  # the common case
    runs: list[tuple[CallEvent, list[str]]] = []
    for event in events:
        piece = _piece(event)
        if piece == "":
            continue
        if piece is not None and runs and _continues(runs[-1][0], event):
            runs[-1][1].append(piece)
        else:
            runs.append((event, [] if piece is None else [piece]))
    return [_with_piece(event, "".join(pieces)) for event, pieces in runs]


def _piece(event: CallEvent) -> str | None:
    if isinstance(event, Content):
        return event.text
    return event.json if isinstance(event, CallArguments) else None


def _continues(last: CallEvent, event: CallEvent) -> bool:
    if isinstance(last, CallArguments) and isinstance(event, CallArguments):
        return last.index == event.index
    return isinstance(last, Content) and isinstance(event, Content)


def _with_piece(event: CallEvent, piece: str) -> CallEvent:
    if isinstance(event, Content):
        return Content(piece)
    return CallArguments(event.index, piece) if isinstance(event, CallArguments) else event


_Result = TypeVar("_Result")

Reading: TypeAlias = Generator[None, None, _Result]
"""A reader under way; each `yield` waits for more text, or for its end."""

Emit: TypeAlias = Callable[[str], None]
"""Takes text that a reader has read and, where needed, rewritten."""

SPACE: Final = re.compile(r"[ \t\r\n]+")


MAX_NAME: Final = 256
"""Characters of a name that is held back until its end comes."""


class Malformed(Exception):
    """The text differs from the expected form. It never leaves this room."""


class CutOff(Malformed):
    """The text has ended too early; its rest can only be the beginning of the expected form."""


class TextSource:
    """Text, the position up to which it is read, and the position up to which it is settled: text in between can still
    become content.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self._settled = 0
        self.has_ended = False

    def push(self, text: str) -> None:
        """Appends text, and drops text that has been settled."""
        self.text = self.text[self._settled :] + text
        self.position -= self._settled
        self._settled = 0

    def settle(self) -> str:
        """Settles the text that was read, and returns it."""
        read, self._settled = self.text[self._settled : self.position], self.position
        return read

    @property
    def next_character(self) -> str:
        """Next character, without waiting; empty if it has not come."""
        return self.text[self.position : self.position + 1]

    def peek(self) -> Reading[str]:
        """The next character, which remains; empty at the end."""
        while self.position == len(self.text) and not self.has_ended:
            yield
        return self.text[self.position : self.position + 1]

    def take(self, literal: str) -> Reading[bool]:
        """Reads `literal` if it comes next. Waits no longer than it may still come."""
        while True:
            if self.text.startswith(literal, self.position):
                self.position += len(literal)
                return True
            rest = self.text[self.position : self.position + len(literal)]
            if self.has_ended or not literal.startswith(rest):
                return False
            yield

    def pass_over(self, literal: str) -> Reading[None]:
        """Reads `literal`, or as much of it as there is at the end, if it comes next."""
        if not (yield from self.take(literal)) and self.has_ended and literal.startswith(self.text[self.position :]):
            self.position = len(self.text)

    def expect(self, literal: str) -> Reading[None]:
        """Raises `Malformed` if something else comes."""
        if not (yield from self.take(literal)):
            is_cut = self.has_ended and literal.startswith(self.text[self.position :])
            raise CutOff if is_cut else Malformed

    def take_run(self, run: re.Pattern[str]) -> str:
        """Characters of a run that have come. `run` matches one or more characters, each by itself."""
        found = run.match(self.text, self.position)
        if found is None:
            return ""
        self.position = found.end()
        return found[0]

    def take_all(self, run: re.Pattern[str]) -> Reading[str]:
        """A whole run, however many pieces it comes in; it may be empty."""
        pieces = []
        while (yield from self.peek()):
            if not (piece := self.take_run(run)):
                break
            pieces.append(piece)
        return "".join(pieces)

    def take_until(self, end: str, limit: int | None = None) -> Reading[str]:
        """The text before `end`, which is read, too. Raises `Malformed` beyond the limit, `CutOff` at the end."""
        num_searched = 0
        while True:
            found = self.text.find(end, self.position + num_searched)
            num_before = (found if found >= 0 else len(self.text) - len(end) + 1) - self.position
            if limit is not None and num_before > limit:
                raise Malformed
            if found >= 0:
                text = self.text[self.position : found]
                self.position = found + len(end)
                return text
            if self.has_ended:
                self.position = len(self.text) - held_back(self.text[self.position :], (end,))
                raise CutOff
            num_searched = max(0, num_before)
            yield

    def pass_until(self, end: str, emit: Emit) -> Reading[None]:
        """Reads the text before `end`, and `end`; `emit` gets the text as it comes. Raises `Malformed` at the end."""
        while True:
            found = self.text.find(end, self.position)
            stop = found if found >= 0 else len(self.text) - held_back(self.text[self.position :], (end,))
            text = self.text[self.position : stop]
            self.position = stop + (len(end) if found >= 0 else 0)
            if text:
                emit(text)
            if found >= 0:
                return
            if self.has_ended:
                raise CutOff
            yield


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Number of characters at the end of `text` that may begin a marker, the longest case counted."""
    return max((_overlap(text, marker) for marker in markers), default=0)


def _overlap(text: str, marker: str) -> int:
    """Most ends have not even a marker's first character: only where it stands can the marker begin."""
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0 and not marker.startswith(text[start:]):
        start = text.find(marker[0], start + 1)
    return len(text) - start if start >= 0 else 0
