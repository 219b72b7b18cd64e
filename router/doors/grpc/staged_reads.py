"""Staged reads of a gRPC server: messages that have arrived are made Python's one after the other, not all in one turn.

gRPC copies a message twice when it hands it over, on the event loop: 1.6 ms for each MiB. And it tells of all that have
arrived in one turn of the loop. So the coroutine of its `read` (grpcio 1.85) is stopped once its message has arrived,
and goes on when its turn has come: after `TURN_BYTES` the next message waits for the next turn. What may not live
here: what is made of messages (`decoding.py`), budgets of bytes (`router/overload/`).
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

import grpc

TURN_BYTES: Final = 2**20
"""Once a turn has copied so many, nothing more is copied in it."""

_EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # it is there


class _Arrived(NamedTuple):
    """A message that waits to be copied."""

    read: Coroutine[Any, Any, Any]
    """Has one step to go."""
    copied: "asyncio.Future[bytes | None]"


class StagedReads:
    """Of the calls on one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[_Arrived] = deque()
        self._num_bytes = 0
        """Copied since the last turn that was full."""
        self._is_full = False
        self.most_bytes = 0
        """The most that a full turn has copied, with what came in those before it."""

    async def read(self, read: Coroutine[Any, Any, Any]) -> bytes | None:
        """The message of a call, whose context's `read` this is; None where the call has ended without one."""
        arrived = read.send(None)
        arrived._asyncio_future_blocking = False  # it may be waited for once more
        try:
            await arrived
        except grpc.aio.BaseError:
            pass  # `read` raises it again, and knows what it means
        except asyncio.CancelledError:
            read.close()
            raise
        if self._num_bytes < TURN_BYTES and not self._waiting:
            return self._copied(read)
        one = _Arrived(read, arrived.get_loop().create_future())
        self._waiting.append(one)
        return await one.copied

    def _copied(self, read: Coroutine[Any, Any, Any]) -> bytes | None:
        """What the last step of a `read` returns."""
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
        """A new turn: as many of those that wait as it may copy."""
        self._num_bytes, self._is_full = 0, False
        while self._waiting and self._num_bytes < TURN_BYTES:
            read, copied = self._waiting.popleft()
            try:
                message = self._copied(read)  # also of a call that was cancelled meanwhile: else gRPC never frees it
            except Exception as error:
                if not copied.done():
                    copied.set_exception(error)
            else:
                if not copied.done():
                    copied.set_result(message)
