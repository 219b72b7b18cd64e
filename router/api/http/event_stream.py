"""Server-sent events: an ASGI response whose events come from an asynchronous generator, and the ids of events.

The status waits for the first event, so that an error before any output has its own status; a client that waits long
gets comments, so that no proxy closes the connection. The response ends when the client is gone.

By ids any SSE client goes on with a stream: it sends the same body again with `Last-Event-ID`. An id is a digest of the
client's resume record: the number of tokens and a checksum stand in place of the tokens. The router computes these
again, since they are a function of the request, and so has the record. An id stands on the last event of each delta;
what came behind the last id is sent again.
"""

import asyncio
import json
import logging
import re
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias

from starlette.types import Receive, Scope, Send

from holdfast.router.api.http.errors import HttpError, http_error
from holdfast.router.api.http.server import CONNECTION, Connection
from holdfast.router.resume import MAX_SEQUENCES, Identity, ResumeRecord, SequenceDelta, SequenceRecord
from holdfast.router.wire.resume_codec import HOLD, StreamFailure, failure_line
from holdfast.worker.errors import HoldfastError, InternalError, InvalidRequestError
from holdfast.worker.request import FinishReason

logger = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 10.0
_COMMENT: Final = b": waiting\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """Encoding of errors for one kind of client."""

    body: Callable[[HttpError], bytes]
    event_name: bytes = b""
    """The line before the data, where the error ends a stream."""


OPENAI: Final = Shape(lambda error: error.openai)
ANTHROPIC: Final = Shape(lambda error: error.anthropic, b"event: error\n")


class EventStream:
    """`events` yields whole events as bytes. It is closed, whatever happens, before the response ends."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        shape: Shape = OPENAI,
        *,
        is_held: bool = False,
    ) -> None:
        """`shape` encodes errors. `is_held`: the client may resume the stream at another router."""
        self._events = events
        self._shape = shape
        self._is_held = is_held
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **headers,
        }
        self.on_status: Callable[[int], None] = lambda status: None
        """Gets the status when it is known."""
        self._has_begun = False
        self._num_written = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streaming = asyncio.current_task()
        assert streaming is not None, "a response is sent by a task"
        watching = asyncio.create_task(_cancel_when_gone(receive, streaming), name="http disconnect")
        waiting = asyncio.create_task(self._comment_when_silent(send, scope.get(CONNECTION)), name="http keep-alive")
        try:
            await self._stream(send)
        except asyncio.CancelledError:
            if not watching.done():  # cancelled by the server, not because the client has left
                raise
            streaming.uncancel()
        finally:
            watching.cancel()
            waiting.cancel()
            await self._events.aclose()

    async def _stream(self, send: Send) -> None:
        try:
            async for event in self._events:
                self._num_written += 1
                if not self._has_begun:
                    await self._begin(send, 200, self._headers)
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except HoldfastError as error:
            await self._fail(send, error)
        except Exception as bug:
            logger.exception("a stream failed: internal error")
            await self._fail(send, InternalError(f"the stream failed: internal error ({type(bug).__name__})"))

    async def _comment_when_silent(self, send: Send, connection: Connection | None) -> None:
        """The producer of the events may write chunks to the connection itself."""
        while True:
            num_written = self._num_written, connection and connection.num_chunks
            await asyncio.sleep(KEEP_ALIVE_S)
            if num_written == (self._num_written, connection and connection.num_chunks):
                await self._write(send, _COMMENT)

    async def _write(self, send: Send, data: bytes) -> None:
        self._num_written += 1
        if not self._has_begun:
            await self._begin(send, 200, self._headers)
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _begin(self, send: Send, status: int, headers: Mapping[str, str]) -> None:
        self._has_begun = True
        self.on_status(status)
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _fail(self, send: Send, error: HoldfastError) -> None:
        """Sends an error as a status if none has been sent, else as a last event."""
        answer = http_error(error)
        if self._has_begun:
            event = self._shape.event_name + b"data: " + self._shape.body(answer) + b"\n\n"
            if self._is_held:
                event += failure_line(StreamFailure(answer.may_retry, error.retry_after_s))
            await send({"type": "http.response.body", "body": event, "more_body": False})
            return
        own: dict[str, str] = {name: self._headers[name] for name in ("x-request-id", HOLD) if name in self._headers}
        await self._begin(send, answer.status, {"content-type": "application/json", **answer.headers, **own})
        await send({"type": "http.response.body", "body": self._shape.body(answer), "more_body": False})


async def _cancel_when_gone(receive: Receive, streaming: "asyncio.Task[object]") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    streaming.cancel()


Frame: TypeAlias = tuple[bytes, bytes]
"""JSON before the text, and JSON after it."""

PLACE: Final = "\x00place of the text\x00"
"""Stands for the text. No model, id or fingerprint contains it."""

json_text: Final = json.encoder.encode_basestring
"""JSON of a string, as `json.dumps` with `ensure_ascii=False`."""


DONE: Final = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""


def event_of(chunk: Mapping[str, Any]) -> bytes:
    """A server-sent event of an object."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n\n"


def frame_of(event: bytes) -> Frame:
    """Frame of an event whose text is `PLACE`."""
    before, after = event.split(json_text(PLACE).encode())
    return before, after


EVENT_IDS: Final = "x-holdfast-event-ids"
"""Request header: `1` asks for ids on the events of its stream."""

LAST_EVENT_ID: Final = "last-event-id"
"""Request header: the last id that its client has, as the standard of server-sent events defines it."""

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
    """State of one stream's event ids."""

    identity: Identity
    sequences: dict[int, SequenceDigest] = field(default_factory=dict)
    """Digests by choice."""
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
        """Parses an event id."""
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
    """Checksum of tokens, continuing that of the tokens before them."""
    return zlib.crc32(b"".join(token_id.to_bytes(4, "little") for token_id in token_ids), before)


def _reason(text: str | None) -> FinishReason | None:
    try:
        return None if text is None else FinishReason(text)
    except ValueError:
        raise InvalidRequestError(LAST_EVENT_ID, text, "must be an id of an event of this server") from None
