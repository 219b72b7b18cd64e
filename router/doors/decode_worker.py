"""Decode worker of a router: large messages and bodies are decoded on one thread, one after the other.

Parsers hold Python's lock, so that several threads of them would stand before the event loop one after another; one
thread lets the loop in between. What may not live here: what is decoded, and within which bounds.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from holdfast.worker.free_memory import give_back

T = TypeVar("T")

INLINE_BYTES: Final = 16 * 2**10
"""Messages up to this size are decoded where they arrive: a thread's wake-up would take longer."""

LARGE_BYTES: Final = 2**20
"""After larger ones, memory is given back to the system."""


class DecodeWorker:
    """Used from one event loop. Its thread starts with the first large message."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._num_waiting = 0

    async def run(self, num_bytes: int, decode: Callable[[], T]) -> T:
        """What `decode` makes of a message of this size. Raises what it raises."""
        if num_bytes <= INLINE_BYTES:
            return decode()
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, decode)
        finally:
            self._num_waiting -= 1
            if num_bytes > LARGE_BYTES and not self._num_waiting:
                self._executor.submit(give_back)

    def close(self) -> None:
        """Ends the thread; what waits for it is cancelled."""
        self._executor.shutdown(wait=False, cancel_futures=True)
