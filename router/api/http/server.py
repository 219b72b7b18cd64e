"""HTTP/1.1 server of a router: uvicorn on the router's own event loop, without its signals and logs, and with bounds.

By itself uvicorn takes endless headers, slow senders and slow readers. All uses of its internals are here, as they were
read in uvicorn 0.54: `HttpToolsProtocol`, and `load`, `main_loop` and `shutdown` of `Config` and `Server`.
"""

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from holdfast.router.api.connection_guard import ConnectionGuard
from holdfast.router.config import LimitsConfig
from holdfast.router.overload.overload import Overload
from holdfast.router.security.connection_budgets import ClientConnection

CONNECTION: Final = "holdfast.connection"
"""Key of the connection in an ASGI scope, on a Holdfast server."""


class Connection(HttpToolsProtocol):
    """One client's. Its scopes have it."""

    is_guest = False
    """The connection came while the router accepted none: it may ask for health, send operator commands and resume
    requests."""
    num_chunks = 0
    """Chunks that `write_chunk` has written."""
    client_connection: ClientConnection | None = None
    """Entry of the connection guard."""

    def end_with_answer(self) -> None:
        """Closes it once the request that it is at has been answered."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]  # it takes extensions
        scope[CONNECTION] = self

    def takes_chunks(self) -> bool:
        """Whether the client is connected and reads as fast as the server writes."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_chunk(self, content: bytes) -> None:
        """Writes a chunk, which must not be empty, of the response that is under way, which must be a chunked one."""
        self.num_chunks += 1
        self.transport.write(b"%x\r\n%b\r\n" % (len(content), content))


MAX_GUESTS: Final = 64
"""Connections that arrived while none was accepted; further ones are refused before they are read."""

REFUSED_RETRY_S: Final = 2
MAX_BUFFERED: Final = 16 * 2**10
"""Bytes that may wait in this process for a client to read before their writer waits: output that no longer counts as
unread.
"""

HOST: Final = re.compile(rb"(\[[0-9A-Za-z:.%]+\]|[0-9A-Za-z._~!$&'()*+;=%-]*)(:[0-9]*)?")


class BoundedProtocol(Connection):
    """One connection. A request that exceeds a bound gets an error status, if one can still be sent, and is closed."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        """`config` has `limits`, a `guard` and an `overload` manager, or None, and the `guests` of the server."""
        super().__init__(config, *arguments, **options)
        self._limits: LimitsConfig = config.limits
        self._guard: ConnectionGuard | None = config.guard
        self._overload: Overload | None = config.overload
        self._guests: set[BoundedProtocol] = config.guests
        self._is_refused = False
        self._is_in_head = False
        self._num_head_bytes = 0
        self._arrival: asyncio.TimerHandle | None = None
        """Until the request that is being sent must be here."""
        self._reading: asyncio.TimerHandle | None = None
        """Waits until the client must have read a part of the waiting output."""

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(MAX_BUFFERED)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503, "the server has its maximum number of connections (limits.max_connections)")
        elif self._overload is not None and not self._overload.takes_connection():
            self._come_as_guest(self._overload)
        else:
            if self._guard is not None and self.client is not None:
                self.client_connection = self._guard.http_connection(*self.client)
                if len(self.connections) > self._limits.max_unauthenticated_connections:
                    self._close_strangers(self._guard)
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guests.discard(self)
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

    # --- callbacks of the parser ---

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0
        self._expect_request()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._check_head(len(self.url) + sum(len(name) + len(value) for name, value in self.headers))
        self._check_host([value for name, value in self.headers if name == b"host"])
        self._check_upgrade(self._get_upgrade())
        if not self._is_refused:
            super().on_headers_complete()
            if self.is_guest and self.cycle is not None:
                self.cycle.keep_alive = False

    def _unsupported_upgrade_warning(self) -> None:
        """Suppresses uvicorn's (0.54) two log lines for each request that offers another protocol, which need not be
        taken.
        """

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        _cancel(self._arrival)
        if not self._is_refused:
            super().on_message_complete()

    # --- inside ---

    def _come_as_guest(self, overload: Overload) -> None:
        """Admits one request, which is served if it is of a kind that is never refused for being new."""
        if len(self._guests) >= MAX_GUESTS:
            self._refuse(503, str(overload.refuse_connection()))
            return
        self.is_guest = True
        self._guests.add(self)
        self._expect_request()

    def _expect_request(self) -> None:
        _cancel(self._arrival)
        message = "the request has taken too long to arrive (limits.receive_timeout_s)"
        self._arrival = self.loop.call_later(self._limits.receive_timeout_s, self._refuse, 408, message)

    def _check_head(self, num_bytes: int) -> None:
        most = self._limits.max_header_bytes
        if num_bytes > most and not self._is_refused:
            self._refuse(431, f"the headers have more than {most} bytes (limits.max_header_bytes)")

    def _check_host(self, hosts: list[bytes]) -> None:
        """Checks the Host header by RFC 9112 (3.2). Of several hosts, each reader on the way may take another one."""
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._refuse(400, "a request must have one Host header")
        elif hosts and not HOST.fullmatch(hosts[0]):
            self._refuse(400, "the Host header must be a host's name or address, and a port or none")
        elif not self.url.startswith((b"/", b"*")) and self.url.split(b"/")[2:3] != hosts:
            self._refuse(400, "the host of the request's target must be that of its Host header")

    def _check_upgrade(self, offered: bytes | None) -> None:
        """An offer of HTTP/2 may be left. But the parser takes a body behind it for the other protocol's."""
        if offered == b"websocket":
            self._refuse(400, "there are no websockets here")
        elif offered is not None and any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
            self._refuse(400, "a request with a body must offer no other protocol (the Upgrade header)")

    def _close_strangers(self, guard: ConnectionGuard) -> None:
        """Closes the oldest connections that have presented no key, if they are too many."""
        ours = [one for one in self.connections if isinstance(one, BoundedProtocol)]
        held = {one.client_connection: one for one in ours if one.client_connection is not None}
        for connection in guard.http_strangers_overdue(held):
            held[connection].transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answers where nothing is being answered, and closes. The first refusal counts."""
        if self._is_refused:
            return
        self._is_refused = True
        if self.cycle is None or self.cycle.response_complete:
            body = message.encode()
            head = f"HTTP/1.1 {status} \r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\nconnection: close"
            head += f"\r\nretry-after: {REFUSED_RETRY_S}" if status == 503 else ""
            self.transport.write(head.encode() + b"\r\n\r\n" + body)
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


BACKLOG = 2048  # connections, uvicorn's default
KEEP_ALIVE_S = 75
TICK_S = 1.0
"""The resolution of the Date header."""


class HttpServer:
    """One ASGI application on one port. `start` binds it, and `stop` ends it once responses are out."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        limits: LimitsConfig | None = None,
        guard: ConnectionGuard | None = None,
        overload: Overload | None = None,
    ) -> None:
        """Binds `host:port`, where port 0 is any free one. The `guard` gets all connections. Raises OSError if the
        port is taken.
        """
        self._socket = _bound(host, port)
        config = _Config(
            app,
            tls,
            limits or LimitsConfig(),
            guard,
            overload,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _Embedded(config)
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """TCP port that the server listens on."""
        port: int = self._socket.getsockname()[1]
        return port

    async def start(self) -> None:
        """Returns once connections are taken."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http server")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)

    async def stop(self, grace_s: float) -> None:
        """Accepts no more connections; open responses have `grace_s` to be sent."""
        if self._serving is None:
            self._socket.close()
            return
        self._server.end()
        try:
            await asyncio.wait_for(asyncio.shield(self._serving), grace_s)
        except TimeoutError:
            self._server.force_exit = True
            await self._serving


class _Config(uvicorn.Config):
    """Configuration with bounds for connections, and a TLS context made elsewhere, since its files may change."""

    def __init__(
        self,
        app: ASGIApp,
        tls: ssl.SSLContext | None,
        limits: LimitsConfig,
        guard: ConnectionGuard | None,
        overload: Overload | None,
        **options: Any,
    ) -> None:
        super().__init__(app, **options)
        self._tls = tls
        self.limits = limits
        self.guard = guard
        self.overload = overload
        self.guests: set[BoundedProtocol] = set()

    def load(self) -> None:
        super().load()
        self.ssl = self._tls


class _Embedded(uvicorn.Server):
    """A server in a process whose signals it does not handle; it sleeps while there are no calls."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Replaces uvicorn's loop, which looks ten times a second whether it is to end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Replaces uvicorn's shutdown, which always sleeps for a tenth of a second. A closing connection without unsent
        data is gone after one turn of the loop.
        """
        for server in self.servers:
            server.close()
        for bound in sockets or []:
            bound.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)
        await self._wait_tasks_to_complete()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_BUFFERED)  # connections inherit it
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound
