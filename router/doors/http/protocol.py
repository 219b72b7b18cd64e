"""HTTP/1.1 protocol with bounds: uvicorn's own, which by itself takes endless headers, slow senders and slow readers.

What may not live here: what is answered (`app.py`), limits of what a request says (`router/config.py` has the numbers).
"""

import asyncio
from typing import Any

from holdfast.router.config import LimitsConfig
from holdfast.router.doors.http.connection import Connection


class BoundedProtocol(Connection):
    """One connection. What goes over a bound is told its status where that can be told, and is closed."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        """`config` has `limits`."""
        super().__init__(config, *arguments, **options)
        self._limits: LimitsConfig = config.limits
        self._is_refused = False
        self._is_in_head = False
        self._num_head_bytes = 0
        self._arrival: asyncio.TimerHandle | None = None
        """Until the request that is being sent must be here."""
        self._reading: asyncio.TimerHandle | None = None
        """Until the client must have taken some of what waits for it."""

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503, "the server has as many connections as it takes (limits.max_connections)")
        else:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._arrival)
        _cancel(self._reading)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            self._check_head(self._num_head_bytes)

    def pause_writing(self) -> None:
        super().pause_writing()
        _cancel(self._reading)
        self._reading = self.loop.call_later(self._limits.slow_reader_s, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._reading)
        super().resume_writing()

    # --- what the parser finds ---

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0
        self._expect_request()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._check_head(len(self.url) + sum(len(name) + len(value) for name, value in self.headers))
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        _cancel(self._arrival)
        if not self._is_refused:
            super().on_message_complete()

    # --- inside ---

    def _expect_request(self) -> None:
        _cancel(self._arrival)
        told = "the request has taken too long to arrive (limits.receive_timeout_s)"
        self._arrival = self.loop.call_later(self._limits.receive_timeout_s, self._refuse, 408, told)

    def _check_head(self, num_bytes: int) -> None:
        most = self._limits.max_header_bytes
        if num_bytes > most and not self._is_refused:
            self._refuse(431, f"the headers have more than {most} bytes (limits.max_header_bytes)")

    def _refuse(self, status: int, message: str) -> None:
        """Answers where nothing is being answered, and closes."""
        self._is_refused = True
        if self.cycle is None or self.cycle.response_complete:
            body = message.encode()
            head = f"HTTP/1.1 {status} \r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\nconnection: close"
            self.transport.write(head.encode() + b"\r\n\r\n" + body)
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
