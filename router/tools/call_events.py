"""Tool call events: what a parser of a model's output reports, as plain data.

What may not live here: formats, parsing, and the shapes in which a door sends calls to its clients.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


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
