"""Ports of one router: its servers, where each listens, and their end. Servers there get them as their ports."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from holdfast.router.api.connection_guard import ConnectionGuard
from holdfast.router.api.grpc import standard_services as health
from holdfast.router.api.http.server import HttpServer
from holdfast.router.config import LimitsConfig
from holdfast.router.overload.overload import Overload
from holdfast.worker.wire.loopback import LOOPBACK, host_port
from holdfast.worker.wire.tls import ServerTls, add_port

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)


class Ports:
    """Addresses are `host:port`, and empty where nothing listens."""

    def __init__(
        self,
        server: grpc.aio.Server,
        build_server: Callable[..., grpc.aio.Server],
        tls: ServerTls | None,
        guard: ConnectionGuard,
    ) -> None:
        """`server` has the servicers of the API, `build_server` makes another for those of operators; `tls` is for the
        ports of the API, and the `guard` for all.
        """
        self.grpc = self.http = self.admin = ""
        self._server = server
        self._build_server = build_server
        self._tls = tls
        self._guard = guard
        self._http_server: HttpServer | None = None
        self._admin_server: grpc.aio.Server | None = None

    async def serve_grpc(self, host: str, port: int) -> None:
        """Raises `RuntimeError` if the port is taken."""
        bound = add_port(self._server, host_port(host, port), self._tls)
        await self._server.start()
        self._guard.start(bound)
        self.grpc = host_port(host, bound)
        logger.info("the router listens on %s", self.grpc)

    async def serve_http(
        self, app: "ASGIApp", limits: LimitsConfig, host: str, port: int, overload: Overload | None = None
    ) -> None:
        """Raises `RuntimeError` if the port is taken; then nothing is served."""
        tls = None if self._tls is None else self._tls.context()
        try:
            self._http_server = HttpServer(app, host, port, tls, limits, self._guard, overload)
        except OSError as taken:
            await self._server.stop(None)
            raise RuntimeError(f"HTTP cannot listen on {host_port(host, port)}: {taken}") from taken
        await self._http_server.start()
        self.http = host_port(host, self._http_server.port)
        logger.info("the router serves HTTP on %s", self.http)

    async def serve_admin(self, servicer: health.HealthServicer, port: int) -> None:
        """Channelz and health, on loopback. Raises `RuntimeError` if the port is taken; then nothing is served."""
        from holdfast.router.api.grpc import channelz  # few need it

        self._admin_server = self._build_server(
            {channelz.SERVICE: channelz.ChannelzServicer(), health.SERVICE: servicer}
        )
        try:
            bound = self._admin_server.add_insecure_port(f"{LOOPBACK}:{port}")
        except RuntimeError:
            await self._server.stop(None)
            if self._http_server is not None:
                await self._http_server.stop(0.0)
            raise
        await self._admin_server.start()
        self._guard.start(bound)
        self.admin = f"{LOOPBACK}:{bound}"
        logger.info("the router serves operators on %s", self.admin)

    async def stop(self, grace_s: float) -> None:
        """Open calls have so long to send their status."""
        await self._server.stop(grace_s)
        if self._admin_server is not None:
            await self._admin_server.stop(None)
        if self._http_server is not None:
            await self._http_server.stop(grace_s)
        await self._guard.stop()
