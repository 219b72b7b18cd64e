"""HTTP transport of other people's clients (httpx, httpx2), under which their streams survive the loss of a router.

    http = httpx.Client(transport=HoldingTransport(["10.0.0.1:8000", "10.0.0.2:8000"]))
    OpenAI(base_url="http://10.0.0.1:8000/v1", api_key="none", http_client=http)

One object is a transport of either package, for blocking and asynchronous clients.
"""

import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.cluster.client.http_packages import AsyncIo, BlockingIo, Io, Package, at_once, package_of
from holdfast.cluster.client.resumable_call import HeldCall, error_event, is_sent_once
from holdfast.cluster.client.retry_policy import RECONNECT_S, RetryPolicy
from holdfast.router.wire.resume_codec import HOLD
from holdfast.worker.wire.tls import Tls

SILENCE_S: Final = 25.0
"""A stream that is silent for this long is lost: a router without output sends a comment every ten seconds."""

CONNECT_S: Final = 2.0
"""The longest that a connection may take: another router may be there at once."""

_PORTS: Final = {"http": 80, "https": 443}
_OF_KEYS: Final = {b"authorization", b"x-api-key"}
_REPLACED: Final = {b"host", b"content-length", b"transfer-encoding", b"accept-encoding"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port of a router."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, address: str) -> "Origin":
        """Origin of a request."""
        url = urlsplit(address if "://" in address else f"http://{address}")
        if url.scheme not in _PORTS or not url.hostname or url.path.strip("/"):
            raise ValueError(f"addresses = {address!r}: each must be host:port, or http://host:port")
        return cls(url.scheme, url.hostname, url.port or _PORTS[url.scheme])

    @classmethod
    def of_url(cls, url: Any) -> "Origin":
        """Origin of a URL."""
        return cls(url.scheme, url.host.strip("[]"), url.port or _PORTS.get(url.scheme, 0))


class HoldingTransport:
    """HTTP transport for the routers at `addresses`; requests to other hosts pass unchanged.

    A request to one of the routers is sent to any that answers. When a router is lost, a stream continues at another
    one, or at the same one once it is back, with the events that it would have had; a request without a stream is sent
    again. The transport gives up `reconnect_s` seconds after the loss, or `connect_s` seconds after the first try if no
    router was ever reached, and then raises the package's own error. Answers of servers that are not Holdfast routers
    pass unchanged.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        connect_s: float = 5.0,
        reconnect_s: float = RECONNECT_S,
        api_key: str = "",
        tls: Tls | None = None,
        draw: Callable[[], float] = random.random,
        **options: Any,
    ) -> None:
        """`options` are those of the package's own transport, such as `verify` and `limits`. `tls` stands for `verify`.
        Requests without an API key get `api_key`.
        """
        if tls is not None:
            options = {**options, "verify": tls.client_context()}
        if isinstance(addresses, str) or not addresses:
            raise ValueError(f"addresses = {addresses!r}: must be a list of at least one address")
        self.origins = [Origin.of(address) for address in addresses]
        self.at = int(draw() * len(self.origins))  # clients spread over the routers
        self.strangers: set[Origin] = set()
        """Origins that have answered as servers other than Holdfast do."""
        self._connect_s = connect_s
        self._reconnect_s = reconnect_s
        self._draw = draw
        self._options = options
        self.api_key = api_key
        self._ios: dict[tuple[str, type[Io]], Io] = {}

    def handle_request(self, request: Any) -> Any:
        """Sends a request of a blocking client; called by the HTTP package."""
        io = self._io(package_of(request), BlockingIo)
        if self._is_foreign(request):
            return at_once(io.send(request))
        return at_once(_Held(self, io, request, request.read(), self._retry_policy()).answer())

    async def handle_async_request(self, request: Any) -> Any:
        """Sends a request of an asynchronous client; called by the HTTP package."""
        io = self._io(package_of(request), AsyncIo)
        if self._is_foreign(request):
            return await io.send(request)
        return await _Held(self, io, request, await request.aread(), self._retry_policy()).answer()

    def close(self) -> None:
        """Closes the transport of a blocking client."""
        for (_, kind), io in self._ios.items():
            if kind is BlockingIo:
                at_once(io.close())

    async def aclose(self) -> None:
        """Closes the transport of an asynchronous client."""
        for (_, kind), io in self._ios.items():
            if kind is AsyncIo:
                await io.close()

    def __enter__(self) -> "HoldingTransport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "HoldingTransport":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def use_next_router(self, at: int) -> None:
        """Asks the next router from here on, unless another request has moved on already."""
        if self.at == at:
            self.at = (at + 1) % len(self.origins)

    def _io(self, package: Package, kind: type[Io]) -> Io:
        name = (package.__name__, kind)
        if name not in self._ios:
            self._ios[name] = kind(package, self._options)
        return self._ios[name]

    def _is_foreign(self, request: Any) -> bool:
        origin = Origin.of_url(request.url)
        return origin not in self.origins or origin in self.strangers

    def _retry_policy(self) -> RetryPolicy:
        return RetryPolicy(
            num_routers=len(self.origins),
            connect_s=self._connect_s,
            reconnect_s=self._reconnect_s,
            timeout_s=None,
            draw=self._draw,
            now=time.monotonic(),
            sees_admission=False,
        )


class _Held:
    """One request, on its way through any number of routers."""

    def __init__(
        self, transport: HoldingTransport, io: Io, request: Any, content: bytes, retry_policy: RetryPolicy
    ) -> None:
        self._transport = transport
        self._io = io
        self._request = request
        self._call = HeldCall(content, retry_policy, time.monotonic())
        self._at = 0
        """The router that was asked last."""
        self._timeout: dict[str, float | None] = {}
        """Timeouts of the last submission: the package reads them again when it begins to read the body."""
        self._response: Any = None

    async def answer(self) -> Any:
        """The response for the client."""
        response = await self._asked()
        if self._call.record is None or response.status_code != 200:
            return response
        return self._io.streamed(response, self._events(), self._close)

    async def _asked(self) -> Any:
        """The next response that is worth having, asking again and again. All but a stream is read to its end."""
        while True:
            self._at = self._transport.at
            try:
                response = await self._io.send(self._submission())
                verdict = self._verdict(response)
                if verdict == "take" and (self._call.record is not None or HOLD not in response.headers):
                    self._response = response
                    return response
                await self._io.read(response)
                if verdict != "again":
                    return response
            except self._io.lost as lost:
                was_sent = not isinstance(lost, self._io.unsent)
                self._call.note_lost(time.monotonic(), was_sent=was_sent)
                if was_sent and is_sent_once(self._request.method, self._request.url.path):
                    raise
                if not await self._has_paused():
                    raise
                continue
            if not await self._has_paused(_retry_after_s(response)):
                return response

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream, from whichever routers."""
        call = self._call
        while True:
            lost: Exception | None = None
            self._listen()
            try:
                async with aclosing(self._io.chunks(self._response)) as chunks:
                    async for data in chunks:
                        if events := call.push(data):
                            yield events
                        if call.failed is not None:
                            break
            except self._io.lost_stream as error:
                lost = error
            await self._close()
            if call.is_over:
                return
            failed = call.failed
            if failed is not None and not (failed.may_retry and await self._has_paused(failed.retry_after_s)):
                yield failed.events
                return
            if failed is None and not await self._has_paused():
                raise lost or self._io.cut(self._request)
            response = await self._asked()
            if response.status_code != 200:
                yield error_event(response.content)
                return

    async def _close(self) -> None:
        if self._response is not None:
            await self._io.close_response(self._response)

    async def _has_paused(self, hint_s: float | None = None) -> bool:
        """Gets ready to ask the next router; False if there is no use in it."""
        self._transport.use_next_router(self._at)
        pause_s = self._call.pause_s(time.monotonic(), hint_s)
        if pause_s is None:
            return False
        await self._io.sleep(pause_s)
        return True

    def _submission(self) -> Any:
        """The request as it is sent next."""
        request, origin = self._request, self._transport.origins[self._at]
        added, content = self._call.submission(time.monotonic())
        kept = [(name, value) for name, value in request.headers.raw if name.lower() not in _REPLACED]
        if self._transport.api_key and not any(name.lower() in _OF_KEYS for name, _ in kept):
            kept.append((b"authorization", f"Bearer {self._transport.api_key}".encode()))
        self._timeout = dict(request.extensions.get("timeout", {}))
        self._timeout["connect"] = _earlier(self._timeout.get("connect"), CONNECT_S)
        return self._io.package.Request(
            request.method,
            request.url.copy_with(scheme=origin.scheme, host=origin.host, port=origin.port),
            headers=[*kept, (b"accept-encoding", b"identity"), *((k.encode(), v.encode()) for k, v in added.items())],
            content=content,
            extensions={**request.extensions, "timeout": self._timeout},
        )

    def _listen(self) -> None:
        self._timeout["read"] = _earlier(self._timeout.get("read"), SILENCE_S)

    def _verdict(self, response: Any) -> str:
        headers = response.headers
        if HOLD not in headers and self._call.record is None and response.status_code == 200:
            self._transport.strangers.add(self._transport.origins[self._at])
        return self._call.verdict(response.status_code, headers.get(HOLD), headers.get("x-should-retry"))


def _retry_after_s(response: Any) -> float | None:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdecimal() else None


def _earlier(given: float | None, most: float) -> float:
    return most if given is None else min(given, most)
