"""Event loop on a separate thread, for callers on other threads. A caller that waits on it is answered,
whenever it ends.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Final, TypeVar

from holdfast.worker.replica.processes import open_standard_streams

ResultT = TypeVar("ResultT")

CANCEL_LIMIT_S: Final = 5.0
"""Seconds to wait for cancelled work when the loop ends."""


class LoopThread:
    """Made with its thread running. Its methods may be called from any thread but its own."""

    def __init__(
        self,
        name: str,
        closed: Callable[[], Exception],
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        """`closed` makes the error of callers that wait for something when this is closed, or comes later."""
        open_standard_streams()
        self.loop = new_loop()
        self._closed = closed
        self._gate = threading.Lock()
        """Work handed to the loop under this lock, while it is open, is there to be cancelled when it is closed."""
        self._is_closed = False
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of `work` on the loop; an interrupt cancels it. Raises `closed()` where this is closed before it
        has ended.
        """
        with self._gate:
            is_closed = self._is_closed
            future = None if is_closed else asyncio.run_coroutine_threadsafe(work, self.loop)
        if future is None:
            work.close()
            raise self._closed()
        try:
            return future.result()
        except CancelledError:
            if self._is_closed:
                raise self._closed() from None
            raise
        except BaseException:
            future.cancel()
            raise

    def is_this_thread(self) -> bool:
        """Whether the caller is on the loop's own thread, where waiting would block it for ever."""
        return threading.current_thread() is self._thread

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Runs `last`, cancels all other tasks, and ends the thread. Safe to call again, and from several
        threads: all return when it has ended.
        """
        with self._gate:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            if last is not None:
                last.close()
            self._thread.join()
            return
        try:
            asyncio.run_coroutine_threadsafe(_ended(last), self.loop).result()
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


async def _ended(last: Coroutine[Any, Any, None] | None) -> None:
    try:
        if last is not None:
            await last
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CANCEL_LIMIT_S)
