"""Front: one HTTP address for the routers of a machine,
under which streams of stock clients survive the loss of one.
"""

import asyncio
import ipaddress
import logging
import signal
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Final

from starlette.types import Receive, Scope, Send

from holdfast.cluster.client.holding_transport import Origin
from holdfast.cluster.front.relay import CutOffError, Relay
from holdfast.cluster.front.upstream import ClientRequest, FrontStats, RelaySettings, Routers, Upstream
from holdfast.router.api.http.server import CONNECTION, HttpServer
from holdfast.router.config import LimitsConfig
from holdfast.worker.wire.tls import ServerTls, Tls

logger = logging.getLogger(__name__)

METRICS: Final = "/front/metrics"
"""Path of the front's own metrics, for callers on its machine."""

MAX_HELD_BYTES: Final = 512 * 2**20
"""Bodies of open requests, which are kept to be sent again. Above it the front takes small ones alone."""

SMALL_BYTES: Final = 2**16

STOP_S: Final = 1.0
"""Seconds that open responses have to be sent once the front was ordered to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """Addresses that a front listens on, and the routers behind it."""

    routers: Sequence[str]
    """Addresses of the routers' HTTP ports: host:port, or https://host:port."""
    host: str = "127.0.0.1"
    port: int = 0
    tls: Tls | None = None
    """Files of a certificate, by which it says who it is, and of who may come."""
    routers_tls: Tls = field(default_factory=Tls)
    """TLS of calls to routers: `ca` signs their certificates or is the certificate; `cert` and `key` are for routers
    that ask clients for a certificate."""


class Front:
    """The ASGI application. Use `serve` for the whole."""

    def __init__(self, upstreams: Sequence[Upstream], limits: LimitsConfig, settings: RelaySettings) -> None:
        self._routers = Routers(upstreams)
        self._limits = limits
        self._settings = settings
        self.stats = FrontStats()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == METRICS:
            await self._tell(scope, send)
            return
        body = await self._body(receive, send)
        if body is None:
            return
        stats = self.stats
        stats.num_requests += 1
        stats.num_open += 1
        stats.num_held_bytes += len(body)
        try:
            await self._relayed(ClientRequest.of(scope, body), scope, receive, send)
        finally:
            stats.num_open -= 1
            stats.num_held_bytes -= len(body)

    async def _relayed(self, asked: ClientRequest, scope: Scope, receive: Receive, send: Send) -> None:
        relaying = asyncio.current_task()
        assert relaying is not None, "a request is answered by a task"
        watching = asyncio.create_task(_cancel_when_gone(receive, relaying), name="front disconnect")
        try:
            await Relay(asked, self._routers, self.stats, self._settings, scope, send).run()
        except asyncio.CancelledError:
            if not watching.done():  # cancelled by the server, not because the client has left
                raise
            relaying.uncancel()
        except CutOffError:
            scope[CONNECTION].transport.abort()
        finally:
            watching.cancel()

    async def _body(self, receive: Receive, send: Send) -> bytes | None:
        """The bytes of the request. None: it was refused, or its client has gone."""
        parts, size, most = [], 0, self._limits.max_message_bytes
        is_full = self.stats.num_held_bytes > MAX_HELD_BYTES
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                reason = f"the body must have at most {most} bytes (limits.max_message_bytes)"
                await _refuse(send, 400, reason, may_retry=False)
                return None
            if is_full and size > SMALL_BYTES:
                held = f"the front holds {self.stats.num_held_bytes} bytes of requests"
                await _refuse(send, 503, f"{held}: large requests are refused until it holds fewer", may_retry=True)
                return None
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _tell(self, scope: Scope, send: Send) -> None:
        client = scope["client"][0] if scope.get("client") else ""
        is_forwarded = any(name == b"x-forwarded-for" for name, _ in scope["headers"])
        if is_forwarded or not _is_loopback(client):
            await _refuse(send, 403, f"{METRICS} is for callers of this machine", may_retry=False)
            return
        lines = []
        for one in fields(FrontStats):
            kind, suffix = ("gauge", "") if one.name in ("num_open", "num_held_bytes") else ("counter", "_total")
            name = f"holdfast_front_{one.name.removeprefix('num_')}{suffix}"
            lines += [f"# TYPE {name} {kind}", f"{name} {getattr(self.stats, one.name)}"]
        await _answer(send, 200, b"text/plain; version=0.0.4", ("\n".join(lines) + "\n").encode())


def upstreams_of(addresses: Sequence[str], tls: Tls) -> list[Upstream]:
    """Raises `ValueError` for a text that is not an address of a router."""
    origins = [Origin.of(address) for address in addresses]
    if not origins:
        raise ValueError("routers = []: must name at least one router")
    return [Upstream(one.host, one.port, _context_of(tls) if one.scheme == "https" else None) for one in origins]


async def start(
    options: FrontOptions, limits: LimitsConfig | None = None, settings: RelaySettings | None = None
) -> tuple[HttpServer, Front]:
    """A front that listens. Raises OSError if its port is taken, `ConfigurationError` for its certificate."""
    limits = limits or LimitsConfig()
    options.routers_tls.client_context()  # files that cannot be read are refused now, and not at the first call
    front = Front(upstreams_of(options.routers, options.routers_tls), limits, settings or RelaySettings())
    tls = None if options.tls is None else ServerTls(options.tls).context()
    server = HttpServer(front, options.host, options.port, tls, limits)
    await server.start()
    return server, front


async def serve(options: FrontOptions, say: Callable[[str], None]) -> None:
    """Until SIGINT or SIGTERM. Raises as `start` does."""
    server, _ = await start(options)
    ending, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    scheme = "http" if options.tls is None else "https"
    say(f"the front is at {scheme}://{options.host}:{server.port}, before {', '.join(options.routers)}")
    await ending.wait()
    await server.stop(STOP_S)


def _context_of(tls: Tls) -> Callable[[], ssl.SSLContext]:
    """Routers are called by their address, which their certificate need not name. The files may change."""

    def context() -> ssl.SSLContext:
        made = tls.client_context()
        if tls.ca is not None:
            made.check_hostname = False
            made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return made

    return context


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


async def _cancel_when_gone(receive: Receive, relaying: "asyncio.Task[object]") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    relaying.cancel()


async def _refuse(send: Send, status: int, message: str, *, may_retry: bool) -> None:
    body = b'{"error": {"message": "%b", "type": "server_error", "param": null, "code": "front"}}' % message.encode()
    await _answer(send, status, b"application/json", body, (b"x-should-retry", b"true" if may_retry else b"false"))


async def _answer(send: Send, status: int, kind: bytes, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    said = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": said})
    await send({"type": "http.response.body", "body": body, "more_body": False})
