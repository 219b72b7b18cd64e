"""Output signal: wakes the one task that reads an answer. What may not live here: the output (`answer.py`).

As an `asyncio.Event`, which is for any number of tasks and takes several calls to set, to clear and to wait for. An
answer does all three for every token; and most tokens are all that their task waits for, so it may be given them at
once.
"""

import asyncio

from holdfast.router.events import Deliver


class OutputSignal:
    """Is set while there may be output that was not read. For one task, on one event loop."""

    def __init__(self) -> None:
        self.is_set = False
        self._loop = asyncio.get_running_loop()
        self.waiter: asyncio.Future[Deliver | None] | None = None
        """What the task waits for; it may be done."""

    def set(self) -> None:
        self.is_set = True
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def give(self, delivery: Deliver) -> bool:
        """Wakes the task with its output. False where it does not wait, or has been woken."""
        waiter = self.waiter
        if waiter is None or waiter.done():
            return False
        waiter.set_result(delivery)
        return True

    def next(self) -> "asyncio.Future[Deliver | None]":
        """Is done when the signal is set, which it must not be yet, with None; or with what the task was given."""
        self.waiter = self._loop.create_future()
        return self.waiter
