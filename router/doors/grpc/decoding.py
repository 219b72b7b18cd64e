"""Decoding of gRPC messages: from bytes to a message, within the static bounds of its fields.

The one place where the bytes of a call arrive. Unparsable ones (a string that is not UTF-8, say) are INVALID_ARGUMENT
rather than gRPC's UNKNOWN. What may not live here: the bounds (`router/wire/bounds.py`), methods (`handlers.py`).
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from holdfast.router.doors.decode_worker import DecodeWorker
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.wire.message_bounds import Bounds, MalformedMessageError, MessageBounds

Decode: TypeAlias = Callable[[bytes], Awaitable[Message]]
"""Raises `InvalidRequestError`."""


class MessageDecoder:
    """Of one server: large messages go to the decode worker."""

    def __init__(self, bounds: Bounds, worker: DecodeWorker) -> None:
        self._bounds = bounds
        self._worker = worker

    def of(self, message: Descriptor) -> Decode:
        """Decodes messages of a sort. Raises `UnboundedFieldError` where one of its fields has no bound."""
        parse = self.parser(message)

        async def decode(data: bytes) -> Message:
            return await self._worker.run(len(data), partial(parse, data))

        return decode

    def parser(self, message: Descriptor) -> Callable[[bytes], Message]:
        """The same on the caller's thread."""
        message_class: type[Message] = GetMessageClass(message)
        check = MessageBounds.of(message, self._bounds).check
        limit = f"must be a {message.full_name}: well-formed protobuf, with strings in UTF-8"

        def parse(data: bytes) -> Message:
            try:
                check(data)
                return message_class.FromString(data)
            except (DecodeError, MalformedMessageError):
                raise InvalidRequestError("request", data[:100], limit) from None

        return parse
