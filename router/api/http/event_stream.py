"""Server-sent events: an ASGI response whose events come from an asynchronous generator, ended when the client is gone.

The status waits for the first event, so that an error that ends a request before any output is a status of its own; a
client that waits long gets comments, so that no proxy gives the connection up.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from starlette.types import Receive, Scope, Send

from holdfast.router.api.http.errors import HttpError, http_error
from holdfast.router.api.http.server import CONNECTION, Connection
from holdfast.router.wire.resume_codec import HOLD, StreamFailure, failure_line
from holdfast.worker.errors import HoldfastError, InternalError

logger = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 10.0
_COMMENT: Final = b": waiting\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """How errors are encoded for one kind of client."""

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
        """As a status where none has been sent, else as a last event."""
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
"""What is before the text, as JSON, and what is behind."""

PLACE: Final = "\x00place of the text\x00"
"""Stands for the text. No model, id or fingerprint contains it."""

json_text: Final = json.encoder.encode_basestring
"""As `json.dumps` of a string, with `ensure_ascii=False`."""


def frame_of(event: bytes) -> Frame:
    """That of an event whose text is `PLACE`."""
    before, after = event.split(json_text(PLACE).encode())
    return before, after
