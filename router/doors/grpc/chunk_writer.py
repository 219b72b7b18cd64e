"""Chunk writer: writes the chunks of one gRPC stream where they are made, while the stream's own task waits for more.

gRPC's `write` is a coroutine, which ends when the next chunk may be written. Here the dispatcher's call for a step
begins it, and the event loop's callback goes on with it: the task, with all coroutines that are nested in it, is not
woken for a token. What may not live here: what a chunk says (`chunk_encoder.py`), what waits for its turn
(`router/dispatch/output_stream.py`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from holdfast.router.events import Deliver
from holdfast.router.requests.answer import OutputSignal


class ChunkWriter:
    """For one task, which has it take deliveries, awaits `settle` before it writes itself, and closes it in the end."""

    __slots__ = ("_encode", "_error", "_has_output", "_idle", "_waits_for", "_write", "_writing")

    def __init__(
        self,
        write: Callable[[bytes], Coroutine[Any, Any, None]],
        encode: Callable[[Deliver], bytes],
        has_output: OutputSignal,
    ) -> None:
        """`write` may wait for futures of the running event loop alone, as gRPC's does."""
        self._write = write
        self._encode = encode
        self._has_output = has_output
        self._writing: Coroutine[Any, Any, None] | None = None
        self._waits_for: asyncio.Future[Any] | None = None
        """What the chunk that is being written waits for."""
        self._idle: asyncio.Future[None] | None = None
        """What `settle` waits for."""
        self._error: BaseException | None = None

    def take(self, delivery: Deliver) -> bool:
        """Begins to write it. False where an earlier one is being written, or the task is at work. Never raises: the
        task gets what goes wrong.
        """
        waiter = self._has_output.waiter
        if self._writing is not None or waiter is None or waiter.done():
            return False
        try:
            self._writing = self._write(self._encode(delivery))
        except Exception as error:
            self._fail(error)
        else:
            self._go_on()
        return True

    async def settle(self) -> None:
        """Waits until nothing is being written. Raises what the last write has raised."""
        if self._writing is not None:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Leaves what is being written to gRPC."""
        if self._writing is not None and self._waits_for is not None:
            self._waits_for.remove_done_callback(self._go_on)
            self._waits_for.cancel()
            self._writing.close()
            self._writing = None

    def _go_on(self, _: "asyncio.Future[Any] | None" = None) -> None:
        """As a task does with its coroutine."""
        assert self._writing is not None
        try:
            waits_for = self._writing.send(None)
        except StopIteration:
            self._writing = None
        except BaseException as error:
            self._writing = None
            self._fail(error)
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
        self._has_output.set()
