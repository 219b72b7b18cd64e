"""Call watch of a gRPC server: tells the connection guard which calls began, and which their clients reset at once.

A client that opens and resets calls makes the loop work, and no method ever hears of these calls. So an interceptor
notes when each call comes and looks at its end whether it ever began. Whose it is costs a look-up, which is made before
the call's message has come only while the guard suspects somebody.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from holdfast.router.api.connection_guard import ConnectionGuard
from holdfast.router.api.grpc.handlers import Context
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
        return handler

    def came(self, context: Context) -> None:
        """The call's message is not there yet."""
        if self._guard.suspects:
            self._name(context)

    def begun(self, context: Context) -> None:
        """The call's message is there, or it needs none, or it is refused without one. Raises `asyncio.CancelledError`
        if its connection has been cut off: nothing more is to be done for it.
        """
        arrival = _arrival.get()
        if arrival is not None:
            self._name(context)
            arrival.has_begun = True
            if not self._guard.call(arrival.peer, has_key=self._gate.has_entered):
                raise asyncio.CancelledError

    def _name(self, context: Context) -> None:
        arrival = _arrival.get()
        if arrival is not None and not arrival.peer:
            arrival.peer = str(context.peer())

    def _ended(self, arrival: _Arrival, task: "asyncio.Task[Any]") -> None:
        if not arrival.has_begun or task.cancelling():
            self._guard.reset(arrival.peer, arrival.at)
