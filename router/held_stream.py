"""Held stream: what HTTP clients note of a stream, frame by frame, to go on with it at another router; both directions.

A client that asks for it (`HOLD`) gets a mark, an SSE comment, behind the events of each delivery: the tokens and the
number of characters that the events stand for. When its router is lost it sends the same body to another one, with all
that it has noted behind it (`RESUME` says how many bytes). What may not live here: HTTP,
how such a record is read (`router/doors/http/resume_record.py`), and what events say.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from holdfast.router.resume import Progress, Resume
from holdfast.worker.request import FinishReason

HOLD: Final = "x-holdfast-hold"
"""Of a request: the number of the submission, from 1. Of a response to it: which stream it is, as `Identity` writes."""

RESUME: Final = "x-holdfast-resume"
"""Of a request: how many bytes at the end of its body are what its client has noted, and not the body's own."""

REPLICAS: Final = "x-holdfast-replicas"
"""Of a request that holds: `1` asks marks to say which replica has made what they stand for."""

MARK: Final = b": held "


@dataclass(frozen=True, slots=True)
class Identity:
    """What all answers to one request have in common, whichever router gives them."""

    request_id: str
    created: int
    """Seconds since 1970: what its chunks say, and what a chat template takes for the time."""

    @property
    def text(self) -> str:
        """For a header."""
        return f"{self.request_id} {self.created}"

    @classmethod
    def of(cls, text: str) -> Self | None:
        """None for what no router of ours has written."""
        request_id, _, created = text.rpartition(" ")
        return cls(request_id, int(created)) if request_id and created.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What the events before it stand for."""

    choice: int
    token_ids: tuple[int, ...]
    num_chars: int
    finish_reason: FinishReason | None = None
    fingerprint: str = ""
    num_events: int = 0
    """Where events are numbered: all of the stream so far."""
    is_last: bool = False
    """The stream is complete."""
    replica_id: str = ""
    """Where it was asked for."""

    @property
    def line(self) -> bytes:
        """The comment, as an event of its own."""
        said: dict[str, Any] = {"s": self.choice, "t": self.token_ids, "c": self.num_chars, "p": self.fingerprint}
        if self.finish_reason is not None:
            said["f"] = str(self.finish_reason)
        if self.num_events:
            said["e"] = self.num_events
        if self.is_last:
            said["end"] = True
        if self.replica_id:
            said["r"] = self.replica_id
        return _line(said)


def failed_line(*, may_retry: bool, retry_after_s: float | None) -> bytes:
    """The mark behind an event that says an error."""
    return _line({"failed": may_retry, "after": retry_after_s})


def _line(said: Mapping[str, Any]) -> bytes:
    return MARK + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


@dataclass(slots=True)
class NotedSequence:
    """What a client has of one choice."""

    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    finish_reason: str | None = None


@dataclass(slots=True, kw_only=True)
class Noted:
    """What a client has of a stream, and the age of its request."""

    identity: Identity
    sequences: dict[int, NotedSequence] = field(default_factory=dict)
    """By choice: those of which it has anything."""
    fingerprint: str = ""
    num_events: int = 0
    is_over: bool = False
    age_s: float = 0.0

    def note(self, said: Mapping[str, Any]) -> None:
        """Takes a mark, as its JSON reads. Raises `ValueError` for what is none."""
        try:
            sequence = self.sequences.setdefault(said["s"], NotedSequence())
            sequence.token_ids += said["t"]
            sequence.num_chars += said["c"]
            sequence.finish_reason = said.get("f", sequence.finish_reason)
            self.fingerprint = said["p"]
            self.num_events = said.get("e", 0)
            self.is_over = said.get("end", False)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a stream has a mark that no router writes: {error!r}") from None

    @property
    def content(self) -> bytes:
        """For a router that is to go on with the stream."""
        sequences = {
            index: {"t": one.token_ids, "c": one.num_chars, "f": one.finish_reason}
            for index, one in self.sequences.items()
        }
        said = {
            "id": self.identity.text,
            "p": self.fingerprint,
            "e": self.num_events,
            "age": round(self.age_s, 3),
            "sequences": sequences,
        }
        return json.dumps(said, separators=(",", ":")).encode()

    def resume(self, first: int, count: int) -> Resume:
        """For the request whose choices are the `count` from `first` on."""
        have = [index - first for index in self.sequences if first <= index < first + count]
        sequences = tuple(self._progress(first + index) for index in range(max(have, default=-1) + 1))
        return Resume(sequences=sequences, fingerprint=self.fingerprint)

    def _progress(self, choice: int) -> Progress:
        one = self.sequences.get(choice, NotedSequence())
        reason = None if one.finish_reason is None else FinishReason(one.finish_reason)
        return Progress(token_ids=tuple(one.token_ids), text_length=one.num_chars, finish_reason=reason)
