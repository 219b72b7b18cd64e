"""Interceptors of a gRPC server: every call passes the gate first, those of reflection too; and the connection guard
counts calls that began and calls that their clients reset at once.

A client that opens and resets calls costs the event loop time, and no method is ever called for them. So an interceptor
notes the arrival of each call, and at its end whether it began. Finding the caller of a call costs a look-up; it is
made before the call's message has arrived only while the guard suspects an address.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import grpc

from holdfast.router.api.connection_guard import ConnectionGuard
from holdfast.router.api.grpc.handlers import Begun, Context
from holdfast.router.requests.poison_watch import CURRENT_READING
from holdfast.router.requests.tracing import TRACEPARENT, note_incoming
from holdfast.router.router_losses import ROUTERS_LOST, routers_lost
from holdfast.router.security.gate import Gate, bearer
from holdfast.router.wire.statuses import call_status
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import HoldfastError


@dataclass(slots=True)
class _Arrival:
    """A call since it came."""

    at: float
    peer: str = ""
    """Empty until it is known."""
    has_begun: bool = False


_arrival: ContextVar[_Arrival | None] = ContextVar("holdfast_arrival", default=None)


class CallWatch(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # it takes none when it runs
    """The outermost interceptor. `begun` is for handlers, in the task of their call."""

    def __init__(self, guard: ConnectionGuard, gate: Gate) -> None:
        self._guard = guard
        self._gate = gate

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        arrival = _Arrival(self._guard.now())
        _arrival.set(arrival)
        task = asyncio.current_task()
        assert task is not None, "gRPC handles each call in a task"
        task.add_done_callback(partial(self._ended, arrival))
        handler = await continuation(details)
        if handler is None:
            arrival.has_begun = True  # it is answered that there is no such method
        return handler

    def came(self, context: Context) -> None:
        """The call's message is not there yet."""
        if self._guard.budgets.suspects(self._guard.now()):
            self._name(context)

    def begun(self, context: Context) -> None:
        """The call's message is there, or it needs none, or it is refused without one. Raises `asyncio.CancelledError`
        if its connection has been cut off.
        """
        arrival = _arrival.get()
        if arrival is not None:
            self._name(context)
            arrival.has_begun = True
            if not self._guard.call(arrival.peer, has_key=self._gate.is_locked and self._gate.has_entered):
                raise asyncio.CancelledError

    def _name(self, context: Context) -> None:
        arrival = _arrival.get()
        if arrival is not None and not arrival.peer:
            arrival.peer = str(context.peer())

    def _ended(self, arrival: _Arrival, task: "asyncio.Task[Any]") -> None:
        if not arrival.has_begun or task.cancelling():
            self._guard.reset(arrival.peer, arrival.at)


OPEN: Final = (
    "/grpc.health.v1.Health/",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
    "/vllm.grpc.engine.VllmEngine/HealthCheck",
    "/envoy.service.ext_proc.v3.ExternalProcessor/",
)
"""Methods without authentication, for balancers, Kubernetes and gateways: they answer whether anything serves, and
those of an endpoint picker the addresses of routers.
"""

OPERATOR_SERVICES: Final = (
    "/holdfast.v1.AdminService/",
    "/holdfast.v1.Inference/GetLoad",
    "/grpc.channelz.v1.Channelz/",
)
"""Methods that show or change data of all tenants."""


class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # it takes none when it runs
    """Asks once for each call, before any of its messages is read."""

    def __init__(self, gate: Gate, begun: Begun) -> None:
        """`begun` gets the calls that are refused."""
        self._gate = gate
        self._begun = begun

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        method = str(details.method)
        if method.startswith(OPEN):
            return await continuation(details)
        try:
            caller = self._gate.enter(_presented(details))
            if method.startswith(OPERATOR_SERVICES):
                caller.check_operator()
        except HoldfastError as error:
            return _refusing(error, self._begun)
        return await continuation(details)


def _presented(details: grpc.HandlerCallDetails) -> str:
    for name, value in details.invocation_metadata or ():
        if name == "authorization" and isinstance(value, str):
            return bearer(value)
    return ""


def _refusing(error: HoldfastError, begun: Begun) -> "grpc.RpcMethodHandler[Any, Any]":
    """Ends any call at once, whether it streams or not: it waits for no message."""

    async def call(requests: Any, context: Context) -> None:
        begun(context)
        status = call_status(error)
        await context.abort(status.code, status.message, status.trailing_metadata)

    return grpc.stream_stream_rpc_method_handler(call)


REQUEST_ID_HEADER: Final = "x-request-id"


def given_request_id(context: Context) -> str:
    """The id that the call's metadata gives; empty if it gives none. Notes the trace context of its task, and the
    number of routers its client has lost with it: raises `ReplicaError` if the client shall try again later.
    """
    given = dict(context.invocation_metadata() or ())
    if ROUTERS_LOST in given and (reading := CURRENT_READING.get()) is not None:
        reading.suspect(routers_lost(str(given[ROUTERS_LOST])))
    note_incoming(str(given.get(TRACEPARENT, "")))
    return str(given.get(REQUEST_ID_HEADER, ""))


Named = TypeVar("Named", inference_pb2.GenerateRequest, inference_pb2.PoolRequest, inference_pb2.ScoreRequest)


def with_request_id(message: Named, context: Context) -> Named:
    """The message with the id of the metadata, if it has no id itself."""
    given = given_request_id(context)
    if not message.request_id:
        message.request_id = given
    return message


GZIP_OPTIONS: Final = (("grpc.default_compression_level", 1),)
"""Options of a server with this interceptor. 1 is the lowest level that compresses."""


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
