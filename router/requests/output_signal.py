"""Output signal: wakes the one task that reads an answer. What may not live here: the output (`answer.py`).

As an `asyncio.Event`, which is for any number of tasks and takes several calls to set, to clear and to wait for. An
answer does all three for every token that its reader has not taken at once (`Taker` in `dispatch/output_stream.py`).
"""

import asyncio


class OutputSignal:
    """Is set while there may be output that was not read. For one task, on one event loop."""

    __slots__ = ("_loop", "is_set", "waiter")

    def __init__(self) -> None:
        self.is_set = False
        self._loop = asyncio.get_running_loop()
        self.waiter: asyncio.Future[None] | None = None
        """What the task waits for; it may be done."""

    def set(self) -> None:
        self.is_set = True
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def next(self) -> "asyncio.Future[None]":
        """Is done when the signal is set, which it must not be yet."""
        self.waiter = self._loop.create_future()
        return self.waiter
