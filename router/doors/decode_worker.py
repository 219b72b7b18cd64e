"""Decode worker of a router: large messages and bodies are decoded on one thread, one after the other.

Parsers hold Python's lock, so that several threads of them would stand before the event loop one after another; one
thread lets the loop in between. What may not live here: what is decoded, and within which bounds.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar

from holdfast.router.wire.bounds import INLINE_BYTES
from holdfast.worker.free_memory import give_back

T = TypeVar("T")

LARGE_BYTES: Final = 2**20
"""After larger ones, memory is given back to the system."""

GIVE_BACK_AFTER_S: Final = 0.5
"""After the last of them: then what was made of it is gone too."""


class DecodeWorker:
    """Used from one event loop. Its thread starts with the first large message."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._num_waiting = 0
        self._giving_back: asyncio.TimerHandle | None = None

    async def run(self, num_bytes: int, decode: Callable[[], T]) -> T:
        """What `decode` makes of a message of this size. Raises what it raises."""
        if num_bytes <= INLINE_BYTES:
            return decode()
        self._num_waiting += 1
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, decode)
        finally:
            self._num_waiting -= 1
            if num_bytes > LARGE_BYTES and not self._num_waiting:
                self._cancel()
                self._giving_back = loop.call_later(GIVE_BACK_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        with suppress(RuntimeError):  # it has been closed
            self._executor.submit(give_back)

    def _cancel(self) -> None:
        if self._giving_back is not None:
            self._giving_back.cancel()
            self._giving_back = None

    def close(self) -> None:
        """Ends the thread; what waits for it is cancelled. Nothing is to be decoded any more."""
        self._cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)
