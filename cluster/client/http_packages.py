"""Packages of HTTP clients: the interface of httpx and httpx2, blocking and asynchronous, that a transport needs, as
one port.

A blocking port's coroutines never wait for an event loop, so that one program runs on both (`at_once`).
"""

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, TypeAlias, TypeVar

Package: TypeAlias = Any
"""The module `httpx` or `httpx2`."""

T = TypeVar("T")


def package_of(request: Any) -> Package:
    """The package that a request is made by."""
    return import_module(type(request).__module__.partition(".")[0])


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a blocking port must not be awaited")


class Io(ABC):
    """The port: requests go out, responses come back."""

    transport_name: ClassVar[str]

    def __init__(self, package: Package, options: Mapping[str, Any]) -> None:
        self.package = package
        self.transport = getattr(package, self.transport_name)(**{"socket_options": keepalive_options(), **options})
        self.unsent: tuple[type[Exception], ...] = (package.ConnectError, package.ConnectTimeout)
        """No router was reached."""
        self.lost: tuple[type[Exception], ...] = (*self.unsent, package.NetworkError, package.RemoteProtocolError)
        self.lost_stream: tuple[type[Exception], ...] = (*self.lost, package.ReadTimeout)

    def cut(self, request: Any) -> Exception:
        """The error for a stream that ended before it was complete."""
        error: Exception = self.package.RemoteProtocolError("the stream ended before it was complete", request=request)
        return error

    @abstractmethod
    async def send(self, request: Any) -> Any: ...

    @abstractmethod
    async def read(self, response: Any) -> None: ...

    @abstractmethod
    def chunks(self, response: Any) -> AsyncGenerator[bytes, None]:
        """Pieces of the response's body as they come."""
        ...

    @abstractmethod
    async def close_response(self, response: Any) -> None:
        """Closes the response and frees its connection."""
        ...

    @abstractmethod
    def streamed(self, response: Any, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> Any:
        """A response whose body is these events."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Waits `seconds`."""
        ...

    @abstractmethod
    async def close(self) -> None: ...

    def _with_body(self, response: Any, stream: Any) -> Any:
        return self.package.Response(
            response.status_code, headers=response.headers.raw, stream=stream, extensions=response.extensions
        )


class BlockingIo(Io):
    """Input and output for a blocking client."""

    transport_name = "HTTPTransport"

    async def send(self, request: Any) -> Any:
        return self.transport.handle_request(request)

    async def read(self, response: Any) -> None:
        try:
            response.read()
        finally:
            response.close()

    async def chunks(self, response: Any) -> AsyncGenerator[bytes, None]:
        """Pieces of the body, from a blocking iterator."""
        for data in response.stream:
            yield data

    async def close_response(self, response: Any) -> None:
        response.close()

    def streamed(self, response: Any, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> Any:
        return self._with_body(response, _stream_class(self.package, "SyncByteStream", _BlockingStream)(events, close))

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def close(self) -> None:
        self.transport.close()


class AsyncIo(Io):
    """Input and output for an asynchronous client, on any event loop that its package supports."""

    transport_name = "AsyncHTTPTransport"

    async def send(self, request: Any) -> Any:
        return await self.transport.handle_async_request(request)

    async def read(self, response: Any) -> None:
        try:
            await response.aread()
        finally:
            await response.aclose()

    async def chunks(self, response: Any) -> AsyncGenerator[bytes, None]:
        """Pieces of the body, from an asynchronous iterator."""
        async for data in response.stream:
            yield data

    async def close_response(self, response: Any) -> None:
        await response.aclose()

    def streamed(self, response: Any, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> Any:
        return self._with_body(response, _stream_class(self.package, "AsyncByteStream", _AsyncStream)(events, close))

    async def sleep(self, seconds: float) -> None:
        """Waits `seconds` on anyio's loop."""
        import anyio  # the packages bring it for their asynchronous clients

        await anyio.sleep(seconds)

    async def close(self) -> None:
        await self.transport.aclose()


class _Stream:
    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        self._events = events
        self._close = close

    async def _end(self) -> None:
        await self._events.aclose()
        await self._close()


class _BlockingStream(_Stream):
    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                yield at_once(self._events.__anext__())
            except StopAsyncIteration:
                return

    def close(self) -> None:
        at_once(self._end())


class _AsyncStream(_Stream):
    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events

    async def aclose(self) -> None:
        await self._end()


@cache
def _stream_class(package: Package, base: str, own: type[_Stream]) -> type[_Stream]:
    """The packages accept only bodies of their own classes."""
    return type(own.__name__, (own, getattr(package, base)), {})


def keepalive_options() -> list[tuple[int, int, int]]:
    """Options of sockets by which the kernel finds out, in some seconds, that the other host is gone."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # as on Linux
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options
