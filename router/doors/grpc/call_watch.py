"""Call watch of a gRPC server: tells the connection guard which calls began, and which their clients reset at once.

gRPC's own handlers of one message learn of a call when its message is there, and of one that was reset before, never:
a client that opens and resets calls makes the loop work and is seen by nobody. So an interceptor notes when each call
comes and looks at its end whether it ever began. Whose it was is known only to handlers that begin without a message;
they cost more, and are used while the guard suspects somebody. What may not live here: budgets, and what is closed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from holdfast.router.doors.connection_guard import ConnectionGuard
from holdfast.router.doors.grpc.handlers import Context
from holdfast.router.security.gate import Gate


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
        elif handler.request_streaming:
            arrival.has_begun = True  # it begins without a message
        elif self._guard.suspects:
            return _without_message(handler, self._came)
        return handler

    def begun(self, context: Context) -> None:
        """The call's message is there, or it needs none, or it is refused without one. Raises `asyncio.CancelledError`
        if its connection has been cut off: nothing more is to be done for it.
        """
        arrival = _arrival.get()
        if arrival is not None:
            self._came(context)
            arrival.has_begun = True
            if not self._guard.call(arrival.peer, has_key=self._gate.has_entered):
                raise asyncio.CancelledError

    def _came(self, context: Context) -> None:
        arrival = _arrival.get()
        if arrival is not None and not arrival.peer:
            arrival.peer = str(context.peer())

    def _ended(self, arrival: _Arrival, task: "asyncio.Task[Any]") -> None:
        if not arrival.has_begun or task.cancelling():
            self._guard.reset(arrival.peer, arrival.at)


def _without_message(handler: Any, came: Callable[[Context], None]) -> "grpc.RpcMethodHandler[Any, Any]":
    """The handler of one message as one that begins before it."""

    async def call(requests: Any, context: Context) -> None:
        came(context)
        message = await context.read()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # it is there
            return
        if handler.response_streaming:
            await handler.unary_stream(message, context)
        else:
            await context.write(await handler.unary_unary(message, context))

    return grpc.stream_stream_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)
