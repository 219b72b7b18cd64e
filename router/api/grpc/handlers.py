"""gRPC method handlers: register a servicer whose methods take a message and raise `HoldfastError`.

Unlike generated handlers, these take messages as bytes, which are decoded within their bounds (`decoding.py`), and
convert errors to statuses in one place. All begin without a message, and read their own (`decoding.py`): on the wire it
is the same. A method is cancelled as soon as its client is gone.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import isasyncgenfunction
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from holdfast.router.api.grpc.decoding import Decode, MessageDecoder, StagedReads
from holdfast.router.api.intake import Intake
from holdfast.router.overload.byte_ledger import CURRENT_LEASE, Lease
from holdfast.router.requests.poison_watch import PoisonWatch, begin_reading, end_reading, lasting_parts
from holdfast.router.wire.statuses import call_status
from holdfast.worker.errors import HoldfastError, InternalError, InvalidRequestError

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
UnaryMethod: TypeAlias = Callable[[Any, Context], Awaitable[Message]]
StreamMethod: TypeAlias = Callable[[Any, Context], Awaitable[None]]
"""Writes its answers itself, as bytes: through a generator and a serializer, each would take longer."""
GeneratorMethod: TypeAlias = Callable[[Any, Context], AsyncGenerator[Message, None]]
Requests: TypeAlias = AsyncIterator[Message | InvalidRequestError]
"""A client's stream. A message that cannot be decoded becomes an error in its place."""
Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]


class Trailers(Protocol):
    """Makes what the end of a call says besides its status."""

    def __call__(self, *, is_error: bool) -> Metadata: ...


Begun: TypeAlias = Callable[[Context], None]
"""Called with each call when its method is about to run. Raises `asyncio.CancelledError` if its client has been cut
off."""


@dataclass(frozen=True, slots=True)
class CallHooks:
    """Hooks around every call of a server."""

    trailers: Trailers | None = None
    came: Callable[[Context], None] | None = None
    """Called with each call before its message is there."""
    begun: Begun | None = None
    reads: StagedReads = field(default_factory=StagedReads)
    poison_watch: PoisonWatch | None = None
    """Gets each request that is read, except requests of a stream."""
    intake: Intake | None = None
    """Opens a lease for each call; without it nothing counts what calls hold."""

    def lease(self, context: Context) -> AbstractContextManager[Lease | None]:
        """Open while the call is."""
        return nullcontext() if self.intake is None else self.intake.of_grpc(context.peer())


def generic_handler(
    service: ServiceDescriptor, servicer: object, decoder: MessageDecoder, hooks: CallHooks = CallHooks()
) -> "grpc.GenericRpcHandler[Any, Any]":
    """Handlers for all methods of a service: unary ones are coroutines, streams to the client are coroutines that write
    or asynchronous generators, and streams both ways are generators that take `Requests`.
    """
    handlers = {
        method.name: _handler(method, getattr(servicer, method.name), decoder, hooks) for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _handler(
    method: MethodDescriptor, implementation: Any, decoder: MessageDecoder, hooks: CallHooks
) -> "grpc.RpcMethodHandler[Any, Any]":
    decode = decoder.of(method.input_type, _noting(method, None if method.client_streaming else hooks.poison_watch))
    serializer = GetMessageClass(method.output_type).SerializeToString
    if method.client_streaming:
        streams = _streams(implementation, decode, hooks)
        return grpc.stream_stream_rpc_method_handler(streams, response_serializer=serializer)
    if isasyncgenfunction(implementation):
        generated = _generated(implementation, decode, hooks)
        return grpc.stream_stream_rpc_method_handler(generated, response_serializer=serializer)
    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(_stream(implementation, decode, hooks))
    return grpc.stream_unary_rpc_method_handler(_unary(implementation, decode, hooks), response_serializer=serializer)


def _noting(method: MethodDescriptor, watch: PoisonWatch | None) -> Callable[[bytes], None]:
    """Notes a message in the task of its call, before any of it is decoded: decoding may end this process, of which
    the `watch` is to know. Takes the bytes into the call's lease.
    """
    kind, may_come_again = method.full_name, method.input_type.full_name == "holdfast.v1.GenerateRequest"

    def note(data: bytes) -> None:
        if data and watch is not None:
            begin_reading(watch, kind, *(lasting_parts(data) if may_come_again else [data]))
        if (lease := CURRENT_LEASE.get()) is not None:
            lease.take(len(data))

    return note


async def _message(context: Context, hooks: CallHooks) -> bytes:
    """The one message of a call. Raises `asyncio.CancelledError` if its client ends it before."""
    if hooks.came is not None:
        hooks.came(context)
    message = await hooks.reads.read(context.read())
    if message is None:
        raise asyncio.CancelledError
    return message


def _unary(method: UnaryMethod, decode: Decode, hooks: CallHooks) -> Callable[[Any, Context], Awaitable[Message]]:
    async def call(_: Any, context: Context) -> Message:
        request = await _message(context, hooks)
        async with _answering(context, hooks):
            return await method(await decode(request), context)

    return call


def _stream(method: StreamMethod, decode: Decode, hooks: CallHooks) -> Callable[[Any, Context], Awaitable[None]]:
    async def call(_: Any, context: Context) -> None:
        request = await _message(context, hooks)
        async with _answering(context, hooks):
            await method(await decode(request), context)

    return call


def _generated(method: GeneratorMethod, decode: Decode, hooks: CallHooks) -> Callable[[Any, Context], Awaitable[None]]:
    async def call(_: Any, context: Context) -> None:
        request = await _message(context, hooks)
        async with _answering(context, hooks), aclosing(method(await decode(request), context)) as messages:
            async for message in messages:
                await context.write(message)

    return call


def _streams(method: GeneratorMethod, decode: Decode, hooks: CallHooks) -> Callable[[Any, Context], Awaitable[None]]:
    async def call(_: Any, context: Context) -> None:
        requests = _decoded(context, decode, hooks)
        async with _answering(context, hooks), aclosing(method(requests, context)) as messages:
            async for message in messages:
                await context.write(message)

    return call


async def _decoded(context: Context, decode: Decode, hooks: CallHooks) -> AsyncGenerator[Message | InvalidRequestError]:
    while (request := await hooks.reads.read(context.read())) is not None:
        try:
            yield await decode(request)
        except InvalidRequestError as error:
            yield error


@asynccontextmanager
async def _answering(context: Context, hooks: CallHooks) -> AsyncIterator[None]:
    """Converts any exception to the call's status."""
    if hooks.begun is not None:
        hooks.begun(context)
    trailers = hooks.trailers
    try:
        with hooks.lease(context):
            yield
        end_reading()
        if trailers is not None:
            context.set_trailing_metadata(trailers(is_error=False))
    except grpc.aio.BaseError as gone:
        end_reading(gone)
        raise asyncio.CancelledError from gone  # the client is gone
    except asyncio.CancelledError as gone:
        end_reading(gone)
        raise
    except Exception as error:  # noqa: BLE001 - every call is answered, and a bug is logged
        end_reading(error)
        try:
            await _abort(context, error, () if trailers is None else trailers(is_error=True))
        finally:
            error.__traceback__ = None  # a cycle from Python 3.12 on, as in `naming`


async def _abort(context: Context, error: Exception, trailers: Metadata) -> NoReturn:
    if not isinstance(error, HoldfastError):
        logger.error("a call failed: internal error", exc_info=error)
        error = InternalError(f"the call failed: internal error ({type(error).__name__})")
    status = call_status(error)
    try:
        await context.abort(status.code, status.message, (*status.trailing_metadata, *trailers))
    except grpc.aio.AbortError as aborted:
        task = asyncio.current_task()
        assert task is not None, "each call runs in its own task"
        task.add_done_callback(partial(_forget, aborted))
        raise


def _forget(aborted: BaseException, _: object) -> None:
    """Releases the objects of an aborted call, above all its message. gRPC's state of the call keeps the exception,
    whose traceback refers to that state. That is freed by the garbage collector alone, after a hundred calls or more,
    whose messages may have 16 MiB each.
    """
    aborted.__traceback__ = aborted.__context__ = None
