"""Ids of events, by which any SSE client goes on with a stream: it sends the same body again with `Last-Event-ID`.

An id says which request it is and where the client is in it. The router keeps no state for that: the output so far is
computed again, since it is a function of the request. An id stands on the last event of each delivery; what came behind
the last id is sent again.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, cast

from holdfast.router.config import LimitsConfig
from holdfast.router.events import Deliver
from holdfast.router.resume import RESUME, Identity, Noted, NotedSequence
from holdfast.router.wire.json_bounds import JsonBounds, token_ids
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import FinishReason
from holdfast.worker.wire.bound import Bound

EVENT_IDS: Final = "x-holdfast-event-ids"
"""Of a request: `1` asks for ids on the events of its stream."""

LAST_EVENT_ID: Final = "last-event-id"
"""Of a request: the last id that its client has, as the standard of server-sent events has it."""

_END: Final = "end"
_NUMBER: Final = r"\d{1,9}"
_PLACE: Final = re.compile(rf"({_NUMBER}):({_NUMBER}):({_NUMBER}):([0-9a-f]{{8}})(?::([a-z_]{{1,20}}))?")
_ID: Final = re.compile(rf"([0-9a-f]{{32}})\.({_NUMBER}\d{{0,3}})\.({_NUMBER}|{_END})(?:\.(.*))?")


@dataclass(slots=True)
class Place:
    """Where a client is in one choice."""

    num_tokens: int = 0
    num_chars: int = 0
    digest: int = 0
    """CRC-32 of the tokens, which the tokens that are computed again must have."""
    finish_reason: FinishReason | None = None

    def note(self, delivery: Deliver) -> None:
        self.num_tokens += len(delivery.token_ids)
        self.num_chars += len(delivery.text)
        self.digest = digest_of(delivery.token_ids, self.digest)
        self.finish_reason = delivery.finish_reason or self.finish_reason

    def text(self, choice: int) -> str:
        end = f":{self.finish_reason}" if self.finish_reason is not None else ""
        return f"{choice}:{self.num_tokens}:{self.num_chars}:{self.digest:08x}{end}"


@dataclass(slots=True)
class EventIds:
    """Of one stream."""

    identity: Identity
    places: dict[int, Place] = field(default_factory=dict)
    """By choice."""
    num_events: int = 0
    is_over: bool = False
    """The client has all of it."""

    @classmethod
    def asked_by(cls, headers: Mapping[str, str], identity: Identity) -> Self | None:
        """None where no ids are asked for. Raises `InvalidRequestError` for one that is not one of Holdfast's."""
        if text := headers.get(LAST_EVENT_ID, ""):
            return cls.read(text)
        return cls(identity) if headers.get(EVENT_IDS) == "1" else None

    @classmethod
    def read(cls, text: str) -> Self:
        """What an id says."""
        if (found := _ID.fullmatch(text)) is None:
            raise InvalidRequestError(LAST_EVENT_ID, text[:100], "must be an id of an event of this server")
        request_id, created, num_events, places = found.groups()
        ids = cls(Identity(request_id, int(created)))
        if num_events == _END:
            ids.is_over = True
            return ids
        ids.num_events = int(num_events)
        for said in (places or "").split(","):
            if (one := _PLACE.fullmatch(said)) is None:
                raise InvalidRequestError(LAST_EVENT_ID, text[:100], "must be an id of an event of this server")
            choice, num_tokens, num_chars, digest, reason = one.groups()
            ids.places[int(choice)] = Place(int(num_tokens), int(num_chars), int(digest, 16), _reason(reason))
        return ids

    def marked(self, events: bytes, delivery: Deliver, num_events: int, *, is_last: bool) -> bytes:
        """The events of a delivery, the last one with its id."""
        self.places.setdefault(delivery.sequence_index, Place()).note(delivery)
        if not events:
            return events
        where = _END if is_last else f"{num_events}.{','.join(one.text(at) for at, one in self.places.items())}"
        identity = self.identity
        return b"%bid: %b.%d.%b\n\n" % (events[:-1], identity.request_id.encode(), identity.created, where.encode())


def digest_of(token_ids: tuple[int, ...], before: int = 0) -> int:
    """Of tokens, after those `before`."""
    return zlib.crc32(b"".join(token_id.to_bytes(4, "little") for token_id in token_ids), before)


def _reason(text: str | None) -> FinishReason | None:
    try:
        return None if text is None else FinishReason(text)
    except ValueError:
        raise InvalidRequestError(LAST_EVENT_ID, text, "must be an id of an event of this server") from None


_IDS: Final = re.compile(rb'"t"\s*:\s*\[([0-9,\s]*)\]')
_REST: Final = JsonBounds(
    {"sequences": Bound(count=2**16, size=2**21)}, Bound(count=16, size=2**12), Bound(count=2**16), string=2**12
)
"""Bounds of a record without its token ids."""


def read_record(content: bytes, limits: LimitsConfig) -> Noted:
    """What a client says it has, as `Noted.content` writes it. Raises `InvalidRequestError`."""
    lists = list[list[int]]()
    rest, position, num_left = list[bytes](), 0, limits.max_prompt_tokens
    for found in _IDS.finditer(content):
        ids = token_ids(RESUME, b"[%b]" % found[1])
        num_left -= len(ids)
        if num_left < 0:
            limit = f"must have at most {limits.max_prompt_tokens} token ids (limits.max_prompt_tokens)"
            raise InvalidRequestError(RESUME, "more", limit)
        rest += (content[position : found.start(1)], b"%d" % len(lists))
        position = found.end(1)
        lists.append(cast("list[int]", ids))  # there are no brackets inside
    text = b"".join((*rest, content[position:]))
    try:
        _REST.check(text)
    except InvalidRequestError as error:
        raise InvalidRequestError(RESUME, error.value, error.limit) from None
    try:
        return _noted(json.loads(text), lists)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise InvalidRequestError(RESUME, content[:100], f"is not what a Holdfast client sends: {error!r}") from None


def _noted(said: Mapping[str, Any], lists: Sequence[list[int]]) -> Noted:
    return Noted(
        identity=_checked(Identity.of(said["id"])),
        sequences={int(index): _sequence(one, lists) for index, one in said["sequences"].items()},
        fingerprint=_checked(said["p"], str),
        num_events=_checked(said["e"], int),
        age_s=float(said["age"]),
    )


def _sequence(said: Mapping[str, Any], lists: Sequence[list[int]]) -> NotedSequence:
    (number,), reason = said["t"], said["f"]
    ids = lists[_checked(number, int)]
    return NotedSequence(ids, _checked(said["c"], int), reason and str(FinishReason(reason)))


def _checked(value: Any, kind: type | None = None) -> Any:
    if value is None or (kind is not None and type(value) is not kind) or (kind is int and value < 0):
        raise ValueError(f"{value!r} cannot be there")
    return value
