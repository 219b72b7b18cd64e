"""Decoding of gRPC messages: from bytes to a message, within the static bounds of its fields.

The one place where the bytes of a call arrive. Unparsable ones (a string that is not UTF-8, say) are INVALID_ARGUMENT
rather than gRPC's UNKNOWN.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from holdfast.router.api.intake import DecodeWorker
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.wire.message_bounds import Bounds, MalformedMessageError, bounded_parser

Decode: TypeAlias = Callable[[bytes], Awaitable[Message]]
"""Raises `InvalidRequestError`."""


class MessageDecoder:
    """Decoder of one server's messages: large ones go to the decode worker."""

    def __init__(self, bounds: Bounds, worker: DecodeWorker) -> None:
        self._bounds = bounds
        self._worker = worker

    def of(self, message: Descriptor, before: Callable[[bytes], None] = lambda data: None) -> Decode:
        """Decodes messages of a sort; `before` gets the bytes first. Raises `UnboundedFieldError` where one of its
        fields has no bound.
        """
        parse, run = bounded_parser(GetMessageClass(message), self._bounds), self._worker.run
        limit = f"must be a {message.full_name}: well-formed protobuf, with strings in UTF-8"

        async def decode(data: bytes) -> Message:
            before(data)
            try:
                return await run(len(data), partial(parse, data))
            except (DecodeError, MalformedMessageError):
                raise InvalidRequestError("request", data[:100], limit) from None

        return decode


TURN_BYTES: Final = 2**20
"""Bytes after which no further message is copied in a turn of the loop."""

_EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # it is there


class _Arrived(NamedTuple):
    """A message that waits to be copied."""

    read: Coroutine[Any, Any, Any]
    """Has one step to go."""
    copied: "asyncio.Future[bytes | None]"


class StagedReads:
    """Reads of the calls on one event loop, in stages."""

    def __init__(self) -> None:
        self._waiting: deque[_Arrived] = deque()
        self._num_bytes = 0
        """Copied since the last turn that was full."""
        self._is_full = False
        self.most_bytes = 0
        """Most bytes copied in one full turn, with the bytes of messages from earlier turns."""

    async def read(self, read: Coroutine[Any, Any, Any]) -> bytes | None:
        """The message of a call, whose context's `read` this is; None where the call has ended without one."""
        arrived = read.send(None)
        arrived._asyncio_future_blocking = False  # it may be waited for once more
        try:
            await arrived
        except grpc.aio.BaseError:
            pass  # `read` raises it again, and handles it
        except asyncio.CancelledError:
            read.close()
            raise
        if self._num_bytes < TURN_BYTES and not self._waiting:
            return self._copied(read)
        one = _Arrived(read, arrived.get_loop().create_future())
        self._waiting.append(one)
        return await one.copied

    def _copied(self, read: Coroutine[Any, Any, Any]) -> bytes | None:
        """Result of the last step of a `read`."""
        try:
            read.send(None)
        except StopIteration as end:
            message = end.value
        else:
            raise RuntimeError("grpcio reads a message in more steps than it did when this was written")
        if message is _EOF:
            return None
        self._num_bytes += len(message)
        if self._num_bytes >= TURN_BYTES:
            self.most_bytes = max(self.most_bytes, self._num_bytes)
            if not self._is_full:
                self._is_full = True
                asyncio.get_running_loop().call_soon(self._turn)
        return message  # type: ignore[no-any-return]

    def _turn(self) -> None:
        """A new turn: this number of waiting calls may copy."""
        self._num_bytes, self._is_full = 0, False
        while self._waiting and self._num_bytes < TURN_BYTES:
            read, copied = self._waiting.popleft()
            try:
                message = self._copied(read)  # also of a call that was cancelled meanwhile: else gRPC never frees it
            except Exception as error:  # noqa: BLE001 - whatever it is, the call that waits raises it
                if not copied.done():
                    copied.set_exception(error)
            else:
                if not copied.done():
                    copied.set_result(message)
