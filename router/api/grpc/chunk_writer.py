"""Chunk writer: writes the chunks of one gRPC stream where they are made, while the stream's own task waits for more.

gRPC's `write` is a coroutine, which ends when the next chunk may be written. Here the dispatcher's call for a step
begins it, and the event loop's callback goes on with it: the task, with all coroutines that are nested in it, is not
woken for a token.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from holdfast.router.api.chat_answer import ChatDeltas
from holdfast.router.generation import OutputDelta
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.wire.response_codec import delta_message
from holdfast.v1.inference_pb2 import GenerateStreamResponse


class ChunkWriter:
    """Writes for the sink of one task, which awaits `settle` before it writes itself, and closes it in the end."""

    __slots__ = ("_encode", "_error", "_idle", "_sink", "_waits_for", "_write", "_writing")

    def __init__(
        self,
        write: Callable[[bytes], Coroutine[Any, Any, None]],
        encode: Callable[[OutputDelta], bytes],
        sink: SampledAnswer,
    ) -> None:
        """Takes the sink's output from now on. Like gRPC's, `write` may only wait for futures of the running event
        loop.
        """
        self._write = write
        self._encode = encode
        self._sink = sink
        self._writing: Coroutine[Any, Any, None] | None = None
        self._waits_for: asyncio.Future[Any] | None = None
        """Future that the chunk being written waits for."""
        self._idle: asyncio.Future[None] | None = None
        """Future that `settle` waits for."""
        self._error: BaseException | None = None
        sink.take = self.take

    def take(self, delta: OutputDelta) -> bool:
        """Begins to write it. False where an earlier one is being written, or the task is at work. Never raises: the
        task gets the error.
        """
        if self._writing is not None or self._sink.waiter.done():
            return False
        try:
            self._writing = self._write(self._encode(delta))
        except Exception as error:  # noqa: BLE001 - whatever it is, the task of the stream raises it
            self._fail(error)
        else:
            self._go_on()
        return True

    async def settle(self) -> None:
        """Waits until nothing is being written. Raises the error of the last write."""
        if self._writing is not None:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Leaves the current write to gRPC."""
        if self._writing is not None and self._waits_for is not None:
            self._waits_for.remove_done_callback(self._go_on)
            self._waits_for.cancel()
            self._writing.close()
            self._writing = None
        self._waits_for = self._error = None  # whose traceback holds this writer

    def _go_on(self, _: "asyncio.Future[Any] | None" = None) -> None:
        """Drives the coroutine of a write, as a task would."""
        writing = self._writing
        if writing is None:  # `close` came after the awaited write was done, and before the next one
            return
        try:
            waits_for = writing.send(None)
        except StopIteration:
            self._writing = None
        except BaseException as error:  # noqa: BLE001 - whatever it is, the task of the stream raises it
            self._writing = None
            self._fail(error.with_traceback(None))  # which holds this frame, and that the future that has the error
        else:
            waits_for._asyncio_future_blocking = False  # it may be waited for once more
            waits_for.add_done_callback(self._go_on)
            self._waits_for = waits_for
            return
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """Wakes the task, which finds the error in `settle`."""
        self._error = error
        self._sink.notify()


_INDEX, _TOKEN, _TEXT = (
    bytes([GenerateStreamResponse.DESCRIPTOR.fields_by_name[name].number << 3 | kind])
    for name, kind in (("first_token_index", 0), ("token_ids", 2), ("text", 2))
)
"""Tag before each field's content: the field's number, and the wire type 0 for a varint or 2 for a length and that many
bytes.
"""


def varint(number: int) -> bytes:
    """Seven bits to a byte, the lowest first; all bytes but the last have the highest bit set."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


_VARINTS: Final = tuple(map(varint, range(2**14)))
"""Varints of one byte or two, as nearly all indices and lengths are."""


class ChunkEncoder:
    """Encoder of one stream. `chat_deltas` reads chat output from its text."""

    __slots__ = ("_chat_deltas", "_shared")

    def __init__(self, chat_deltas: ChatDeltas | None = None) -> None:
        self._chat_deltas = chat_deltas
        self._shared: dict[tuple[int, str, bool], bytes] = {}
        """Encoded shared fields by sequence, fingerprint and guarantee: one for each sequence, and more after a
        failover."""

    def encode(self, delta: OutputDelta) -> bytes:
        if self._chat_deltas is not None:
            return delta_message(delta._replace(chat=self._chat_deltas.of(delta))).SerializeToString()
        _, first, token_ids, text, reason, usage, logprobs, of_prompt, number, _, origin, replayed, *_ = delta
        if reason is not None or usage is not None or logprobs or of_prompt:
            return delta_message(delta).SerializeToString()
        shared = self._shared.get((number, origin, replayed))
        if shared is None:
            shared = self._shared[number, origin, replayed] = _shared(delta)
        try:
            (token_id,) = token_ids
            token, said = _VARINTS[token_id] if token_id < 2**14 else varint(token_id), text.encode()
            tokens = b"%b%b%b%b%b" % (_INDEX, _VARINTS[first], _TOKEN, _VARINTS[len(token)], token)
            return b"%b%b%b%b%b" % (tokens, _TEXT, _VARINTS[len(said)], said, shared)
        except (ValueError, IndexError):  # several tokens, or a number of more bytes
            new = GenerateStreamResponse(first_token_index=first, token_ids=token_ids, text=text)
            return new.SerializeToString() + shared


def _shared(delta: OutputDelta) -> bytes:
    """All that a chunk says besides its tokens and text."""
    message = delta_message(delta)
    for name in ("first_token_index", "token_ids", "text"):
        message.ClearField(name)
    return message.SerializeToString()
