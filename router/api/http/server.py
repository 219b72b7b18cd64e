"""HTTP server of a router: uvicorn on the router's own event loop, without its signals and logs."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from holdfast.router.api.connection_guard import ConnectionGuard
from holdfast.router.api.http.protocol import MOST_BUFFERED, BoundedProtocol
from holdfast.router.config import LimitsConfig
from holdfast.router.overload.overload import Overload

BACKLOG = 2048
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
        """Takes no more connections; open responses have `grace_s` to be sent."""
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
    """With a context for TLS that is made elsewhere, since its files may change, and bounds for connections."""

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
        """As uvicorn's own, which looks ten times a second whether it is to end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, which sleeps for a tenth of a second in any case. A closing connection without
        unsent data is gone after one turn of the loop.
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
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MOST_BUFFERED)  # connections inherit it
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound
