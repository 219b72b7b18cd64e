"""Ids of events, by which any SSE client goes on with a stream: it sends the same body again with `Last-Event-ID`.

An id is a digest of the client's resume record: the number of tokens and a checksum stand in place of the tokens. The
router computes these again, since they are a function of the request, and so has the record. An id stands on the last
event of each delta; what came behind the last id is sent again.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from holdfast.router.resume_record import MAX_SEQUENCES, Identity, ResumeRecord, SequenceDelta, SequenceRecord
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import FinishReason

EVENT_IDS: Final = "x-holdfast-event-ids"
"""Of a request: `1` asks for ids on the events of its stream."""

LAST_EVENT_ID: Final = "last-event-id"
"""Of a request: the last id that its client has, as the standard of server-sent events has it."""

_END: Final = "end"
_NUMBER: Final = r"\d{1,9}"
_SEQUENCE: Final = re.compile(rf"({_NUMBER}):({_NUMBER}):({_NUMBER}):([0-9a-f]{{8}})(?::([a-z_]{{1,20}}))?")
_ID: Final = re.compile(rf"([0-9a-f]{{32}})\.({_NUMBER}\d{{0,3}})\.({_NUMBER}|{_END})(?:\.(.*))?")


@dataclass(slots=True)
class SequenceDigest:
    """A `SequenceRecord` without its tokens."""

    num_tokens: int = 0
    text_length: int = 0
    checksum: int = 0
    """CRC-32 of the tokens, which the tokens that are computed again must have."""
    finish_reason: FinishReason | None = None

    def add(self, delta: SequenceDelta) -> None:
        self.num_tokens += len(delta.token_ids)
        self.text_length += delta.text_length
        self.checksum = checksum(delta.token_ids, self.checksum)
        self.finish_reason = delta.finish_reason or self.finish_reason

    def text(self, index: int) -> str:
        end = f":{self.finish_reason}" if self.finish_reason is not None else ""
        return f"{index}:{self.num_tokens}:{self.text_length}:{self.checksum:08x}{end}"

    def record(self, index: int, token_ids: Sequence[int]) -> SequenceRecord:
        """The record of sequence `index`, whose tokens were computed again, and some behind them.

        Raises `InvalidRequestError` if these are not the tokens that the client had.
        """
        had = list(token_ids[: self.num_tokens])
        if len(had) < self.num_tokens or checksum(had) != self.checksum:
            limit = "must be of the same request: the tokens that were computed again are not those of the stream"
            raise InvalidRequestError(LAST_EVENT_ID, index, limit)
        return SequenceRecord(token_ids=had, text_length=self.text_length, finish_reason=self.finish_reason)


@dataclass(slots=True)
class EventIds:
    """Of one stream."""

    identity: Identity
    sequences: dict[int, SequenceDigest] = field(default_factory=dict)
    """By choice."""
    num_events: int = 0
    is_over: bool = False
    """The client has all of it."""

    @classmethod
    def asked_by(cls, headers: Mapping[str, str], identity: Identity) -> Self | None:
        """None where no ids are asked for. Raises `InvalidRequestError` for an id that Holdfast has not written."""
        if text := headers.get(LAST_EVENT_ID, ""):
            return cls.read(text)
        return cls(identity) if headers.get(EVENT_IDS) == "1" else None

    @classmethod
    def read(cls, text: str) -> Self:
        """What an id says."""
        if (found := _ID.fullmatch(text)) is None:
            raise InvalidRequestError(LAST_EVENT_ID, text[:100], "must be an id of an event of this server")
        request_id, created, num_events, sequences = found.groups()
        ids = cls(Identity(request_id, int(created)))
        if num_events == _END:
            ids.is_over = True
            return ids
        ids.num_events = int(num_events)
        for said in (sequences or "").split(","):
            if (one := _SEQUENCE.fullmatch(said)) is None or int(one[1]) >= MAX_SEQUENCES:
                raise InvalidRequestError(LAST_EVENT_ID, text[:100], "must be an id of an event of this server")
            choice, num_tokens, text_length, crc, reason = one.groups()
            ids.sequences[int(choice)] = SequenceDigest(
                int(num_tokens), int(text_length), int(crc, 16), _reason(reason)
            )
        return ids

    def record(self, token_ids: Mapping[int, Sequence[int]]) -> ResumeRecord:
        """The client's record, from the tokens of each choice that were computed again.

        Raises `InvalidRequestError` as `SequenceDigest.record` does.
        """
        record = ResumeRecord(identity=self.identity, num_events=self.num_events)
        for choice in range(max(self.sequences, default=-1) + 1):
            digest = self.sequences.get(choice, SequenceDigest())
            record.sequences.append(digest.record(choice, token_ids.get(choice, ())))
        return record

    def marked(self, events: bytes, delta: SequenceDelta) -> bytes:
        """The events of some output, the last one with its id."""
        self.sequences.setdefault(delta.sequence_index, SequenceDigest()).add(delta)
        if not events:
            return events
        known = ",".join(one.text(at) for at, one in self.sequences.items())
        where = _END if delta.is_last else f"{delta.num_events}.{known}"
        identity = self.identity
        return b"%bid: %b.%d.%b\n\n" % (events[:-1], identity.request_id.encode(), identity.created, where.encode())


def checksum(token_ids: Sequence[int], before: int = 0) -> int:
    """Of tokens, after those `before`."""
    return zlib.crc32(b"".join(token_id.to_bytes(4, "little") for token_id in token_ids), before)


def _reason(text: str | None) -> FinishReason | None:
    try:
        return None if text is None else FinishReason(text)
    except ValueError:
        raise InvalidRequestError(LAST_EVENT_ID, text, "must be an id of an event of this server") from None
