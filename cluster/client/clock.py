"""The time that a client goes by: its event loop's, unless a test brings another."""

import asyncio
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, from any moment on."""

    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """The running event loop's."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
