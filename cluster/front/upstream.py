"""Connections of the front to routers: HTTP/1.1, one request at a time on each, kept for the next one. A request as the
front received it, the routers it may go to, and the front's counts.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import httptools
from starlette.types import Scope

from holdfast.cluster.client.http_packages import keepalive_options
from holdfast.cluster.client.resumable_call import is_sent_once
from holdfast.router.router_losses import ROUTERS_LOST
from holdfast.router.wire.resume_codec import HOLD, RESUME

CONNECT_S: Final = 2.0
"""The longest that a connection may take: another router may be there at once."""

IDLE_S: Final = 30.0
"""Seconds that a connection is kept without a request; routers close theirs later."""

MAX_HEAD_BYTES: Final = 2**16


class RouterLostError(Exception):
    """The connection ended, or never was."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        """`was_sent`: the router may have got the request."""
        super().__init__(message)
        self.was_sent = was_sent


@dataclass(slots=True)
class Head:
    """Head of a response."""

    status: int
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    def get(self, name: bytes) -> str | None:
        """The first header of a name in lower case."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)


class Connection(asyncio.Protocol):
    """One connection. `exchange` sends a request; what comes after the head of its response goes to `on_data`."""

    def __init__(self, on_idle: "Callable[[Connection], None]") -> None:
        self._on_idle = on_idle
        self._parser: httptools.HttpResponseParser | None = None
        self._head: asyncio.Future[Head] | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._num_head_bytes = 0
        self._early: list[bytes] = []
        self._on_data: Callable[[bytes], None] | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._has_no_body = False
        self._is_paused = False
        self._idle: asyncio.TimerHandle | None = None
        self.is_over = False
        """The response is complete."""
        self.is_lost = False
        self.last_heard_s = 0.0

    # --- one exchange ---

    async def exchange(self, request: Iterable[bytes], *, is_head: bool = False) -> Head:
        """Sends a request and returns the head of its response. Raises `RouterLostError`."""
        if self._idle is not None:
            self._idle.cancel()
        if self.is_lost:
            raise RouterLostError("the connection has ended", was_sent=False)
        loop = asyncio.get_running_loop()
        self._parser, self._head = httptools.HttpResponseParser(self), loop.create_future()
        self._headers, self._num_head_bytes, self._early, self._on_data = [], 0, [], None
        self._has_no_body, self.is_over = is_head, False
        self.last_heard_s = loop.time()
        self._transport.writelines(request)
        return await self._head

    def deliver(self, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Passes the body to `on_data` as it comes; `on_end` is called when it is complete or lost."""
        early, self._early, self._on_data, self._on_end = self._early, [], on_data, on_end
        for data in early:
            on_data(data)
        if self.is_over or self.is_lost:
            on_end()

    def pause(self) -> None:
        """Reads nothing until `go_on`: TCP then stops the router."""
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def go_on(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self.last_heard_s = asyncio.get_running_loop().time()
            self._transport.resume_reading()

    def close(self) -> None:
        """Ends the connection and discards the rest."""
        self._on_data, self._on_end = _nothing, lambda: None
        if not self.is_lost:
            self.is_lost = True
            if self._transport.get_write_buffer_size():
                self._transport.abort()
            else:
                self._transport.close()

    def release(self) -> None:
        """The response has been taken: the next request may come."""
        if self.is_over and not self.is_lost and self._keeps_alive and not self._has_no_body:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.close)
            self._on_idle(self)
        else:
            self.close()

    # --- the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass of it

    def data_received(self, data: bytes) -> None:
        """Feeds bytes to the HTTP parser; breaks the connection where they are no HTTP."""
        if self._parser is None:
            self._transport.abort()  # nothing was asked
            return
        self.last_heard_s = asyncio.get_running_loop().time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def eof_received(self) -> None:
        """A response without a length ends so; any other is cut off."""

    def connection_lost(self, error: Exception | None) -> None:
        """Fails the open request with RouterLostError, or ends its body."""
        self.is_lost = True
        if self._idle is not None:
            self._idle.cancel()
        if self._head is not None and not self._head.done():
            self._head.set_exception(RouterLostError("the connection broke", was_sent=True))
        elif not self.is_over:
            self._on_end()

    # --- the parser ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_head_bytes += len(name) + len(value)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._transport.abort()
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Passes status and headers on."""
        assert self._parser is not None, "it calls"
        assert self._head is not None, "it was asked for"
        self._keeps_alive = self._parser.should_keep_alive()
        if not self._head.done():
            self._head.set_result(Head(self._parser.get_status_code(), self._headers))
        if self._has_no_body:
            self.is_over = True
            self._on_end()

    def on_body(self, body: bytes) -> None:
        """Passes a piece of the body on, or keeps it until someone reads."""
        if self._on_data is None:
            self._early.append(body)
        else:
            self._on_data(body)

    def on_message_complete(self) -> None:
        """Ends the response."""
        self.is_over = True
        self._on_end()


class Upstream:
    """One router, as the front reaches it."""

    def __init__(self, host: str, port: int, context: Callable[[], ssl.SSLContext] | None = None) -> None:
        """Uses TLS for connections if there is a `context`."""
        self.host, self.port = host, port
        self.num_open = 0
        """Requests that it has of this front."""
        self.is_down_until_s = 0.0
        """Time until which the router counts as down, because it was lost a moment ago."""
        self._context = context
        self._idle: list[Connection] = []

    async def connection(self) -> Connection:
        """A free connection, or a new one. Raises `RouterLostError`."""
        while self._idle:
            if not (kept := self._idle.pop()).is_lost:
                return kept
        context = None if self._context is None else self._context()
        try:
            async with asyncio.timeout(CONNECT_S):
                transport, made = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._idle.append), self.host, self.port, ssl=context
                )
        except (OSError, TimeoutError) as error:
            raise RouterLostError(f"{self.host}:{self.port} cannot be reached: {error}", was_sent=False) from error
        for level, option, value in keepalive_options():
            transport.get_extra_info("socket").setsockopt(level, option, value)
        return made

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _nothing(data: bytes) -> None: ...


HOP_BY_HOP_HEADERS: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade expect content-length accept-encoding".split()
)
OURS: Final = tuple(name.encode() for name in (HOLD, RESUME, ROUTERS_LOST))
_FORWARDED: Final = b"x-forwarded-for"


@dataclass(slots=True)
class FrontStats:
    """Counts of the front since its start."""

    num_requests: int = 0
    num_open: int = 0
    num_held_bytes: int = 0
    """Bodies of open requests."""
    num_routers_lost: int = 0
    """Requests whose router was lost."""
    num_resumed: int = 0
    """Streams that went on at another router."""
    num_repeated: int = 0
    """Requests that were asked again before anything had come."""
    num_given_up: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """Limits on the front's attempts."""

    connect_s: float = 5.0
    reconnect_s: float = 60.0


@dataclass(slots=True)
class Routers:
    """The routers that requests may go to: the one with the fewest requests that is not down, in turns."""

    all: Sequence[Upstream]
    turn: int = 0

    def choose(self, now: float) -> Upstream:
        """The router with the fewest open requests, one that is up before one that is down; round robin among
        equals.
        """
        self.turn += 1
        order = [self.all[(self.turn + number) % len(self.all)] for number in range(len(self.all))]
        return min(order, key=lambda one: (one.is_down_until_s > now, one.num_open))


@dataclass(slots=True)
class ClientRequest:
    """A request as it came."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: str

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> "ClientRequest":
        target: bytes = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        client = scope["client"][0] if scope.get("client") else "unknown"
        return cls(scope["method"].encode(), target, list(scope["headers"]), body, client)

    @property
    def holds_itself(self) -> bool:
        """Whether the client is a Holdfast transport, whose request is passed on unchanged."""
        return any(name == HOLD.encode() for name, _ in self.headers)

    @property
    def is_sent_once(self) -> bool:
        return is_sent_once(self.method.decode(), self.target.decode("latin-1"))

    def bytes_of(self, added: dict[str, str], body: bytes) -> list[bytes]:
        """The request as a router gets it. It learns the client's address: a forwarded client is not on the router's
        machine.
        """
        left_out = HOP_BY_HOP_HEADERS if self.holds_itself else HOP_BY_HOP_HEADERS.union(OURS)
        kept = [(name, value) for name, value in self.headers if name not in left_out and name != _FORWARDED]
        said = [value for name, value in self.headers if name == _FORWARDED]
        kept.append((_FORWARDED, b", ".join([*said, self.client.encode()])))
        kept.append((b"content-length", b"%d" % len(body)))
        kept += ((name.encode(), value.encode()) for name, value in added.items())
        lines = [b"%b %b HTTP/1.1\r\n" % (self.method, self.target)]
        lines += (b"%b: %b\r\n" % pair for pair in kept)
        return [b"".join(lines) + b"\r\n", body]
