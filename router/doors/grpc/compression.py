"""Compression interceptor: large whole answers are gzipped, for clients that say that they take it.

gRPC reads gzip from clients by itself, and does not tell a method whether its call came so. A server's option makes it
compress every message in a way that the client takes; this leaves the small ones and those of streams as they are,
since compression runs on the event loop that all streams wait for. What may not live here: settings
(`router/config.py`).
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from holdfast.router.doors.grpc.handlers import Context

GZIP_OPTIONS: Final = (("grpc.default_compression_level", 1),)
"""Of a server with this interceptor. 1 is the lowest level that compresses."""


class Gzip(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # it takes none when it runs
    """Turns compression off, message by message, but for whole answers of at least `least_bytes`."""

    def __init__(self, least_bytes: int) -> None:
        self._least_bytes = least_bytes

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        codec = handler.request_deserializer, handler.response_serializer
        if not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(self._unary(handler.stream_unary), *codec)
        if inspect.isasyncgenfunction(handler.stream_stream):  # reflection, which has no stream to hold up
            return handler
        return grpc.stream_stream_rpc_method_handler(_plain(handler.stream_stream), *codec)

    def _unary(self, method: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        async def call(request: Any, context: Context) -> Any:
            answer = await method(request, context)
            if answer.ByteSize() < self._least_bytes:
                context.disable_next_message_compression()
            return answer

        return call


def _plain(method: Callable[[Any, Any], Awaitable[None]]) -> Callable[[Any, Context], Awaitable[None]]:
    async def call(requests: Any, context: Context) -> None:
        await method(requests, _PlainContext(context))

    return call


class _PlainContext:
    """The context of a stream whose messages are not compressed."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        self._context.disable_next_message_compression()
        await self._context.write(message)
