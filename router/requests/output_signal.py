"""Output signal: wakes the one task that reads an answer. What may not live here: the output (`answer.py`).

As an `asyncio.Event`, which is for any number of tasks and takes several calls to set, to clear and to wait for. An
answer does all three for every token.
"""

import asyncio


class OutputSignal:
    """Is set while there may be output that was not read. For one task, on one event loop."""

    def __init__(self) -> None:
        self.is_set = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self.is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def next(self) -> asyncio.Future[None]:
        """Is done when the signal is set, which it must not be yet."""
        self._waiter = self._loop.create_future()
        return self._waiter
