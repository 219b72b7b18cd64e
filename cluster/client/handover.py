"""Handover of one stream from an event loop's thread to the thread that iterates over it.

The loop's side reads ahead, up to a limit, so that a chunk costs a queue's put and get and no call from thread to
thread. What may not live here: what a stream is (`async_client.py`), loops and threads themselves
(`blocking_client.py`).
"""

import asyncio
import queue
from collections.abc import AsyncGenerator, Iterator
from typing import Final, Generic, TypeVar

MAX_AHEAD: Final = 64
"""So many are read ahead at most. Then the stream waits for its reader, as a stream that nobody reads does."""

GOES_ON_AT: Final = MAX_AHEAD // 2

ItemT = TypeVar("ItemT")


class Handover(Generic[ItemT]):
    """Reads `items` on `loop` from the first `__next__` on, and raises there what they raise.

    It ends on the loop, by `end`. It has no `close`, which `yield from` would call on the other thread.
    """

    def __init__(self, items: AsyncGenerator[ItemT, None], loop: asyncio.AbstractEventLoop) -> None:
        self._items = items
        self._loop = loop
        self._queue = queue.SimpleQueue[ItemT | _End]()
        self._is_full = False
        self._has_room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False
        self._is_over = False
        """It was ended from outside. For the loop alone."""

    # --- on the thread that iterates ---

    def __iter__(self) -> Iterator[ItemT]:
        return self

    def __next__(self) -> ItemT:
        if not self._has_begun:
            self._has_begun = True
            self._loop.call_soon_threadsafe(self._begin)
        item = self._queue.get()
        if self._is_full and self._queue.qsize() <= GOES_ON_AT:
            self._is_full = False
            self._loop.call_soon_threadsafe(self._has_room.set)
        if isinstance(item, _End):
            self._queue.put(item)  # whoever asks again hears it again
            raise item.error or StopIteration
        return item

    # --- on the loop ---

    async def end(self) -> None:
        """Ends the stream if it has not ended. Its reader, then or later, gets what was read ahead, then an error."""
        self._has_begun = self._is_over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        else:
            self._queue.put(_End(_closed()))
        await self._items.aclose()

    def _begin(self) -> None:
        """Does nothing where the stream was ended between the first `__next__` and this."""
        if not self._is_over:
            self._task = self._loop.create_task(self._read())

    async def _read(self) -> None:
        error: BaseException | None = None
        try:
            async for item in self._items:
                self._queue.put(item)
                if self._queue.qsize() >= MAX_AHEAD:
                    await self._until_read()
        except asyncio.CancelledError:
            error = _closed()
        except BaseException as failure:  # to be raised on the other thread, whatever it is
            error = failure
        self._queue.put(_End(error))

    async def _until_read(self) -> None:
        """The reader sets the event once it has read so much, unless that was before it could see `_is_full`."""
        self._has_room.clear()
        self._is_full = True
        while self._queue.qsize() > GOES_ON_AT:
            await self._has_room.wait()
            self._has_room.clear()
        self._is_full = False


def _closed() -> RuntimeError:
    return RuntimeError("the client was closed while its stream was being read")


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error
