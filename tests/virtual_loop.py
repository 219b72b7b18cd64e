"""An event loop in virtual time: it never sleeps, and counts how often it would have woken. Nothing on it may wait for
a file, a thread or another process.
"""

import asyncio
import selectors
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """`num_wakeups` counts the sleeps that have ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_wakeups = 0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self.now


class _Skipping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("all that runs on the loop waits for something that never comes")
        if timeout > 0:
            self._loop.now += timeout
            self._loop.num_wakeups += 1
        return super().select(0)


def run(main: Awaitable[T]) -> T:
    """As `asyncio.run`, in virtual time."""

    async def awaited() -> T:
        return await main

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(awaited())


async def wakeups_in(seconds: float) -> int:
    """How often the running loop wakes in so many seconds, without the end of them."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    before = loop.num_wakeups
    await asyncio.sleep(seconds)
    return loop.num_wakeups - before - 1
