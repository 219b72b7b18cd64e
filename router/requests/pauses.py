"""Pauses of models by their operators: new requests wait here before anything is computed for them, or are refused.

What may live here: who waits, for how long at most, and how many. What may not: what operators order
(`router/orders.py`), and requests that have been admitted: those go on.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from holdfast.router.orders import Pause
from holdfast.worker.errors import DeadlineExceededError, ModelPausedError, QueueFullError

RETRY_S: Final = 5.0
"""When to come again where a paused model refuses: nobody knows how long a pause takes."""


class Pauses:
    """The pauses of one router, and who waits for their ends. On one event loop."""

    def __init__(self, max_waiting: int) -> None:
        """At most `max_waiting` requests wait, all models together."""
        self._max_waiting = max_waiting
        self.models: dict[str, Pause] = {}
        """Those that are paused, by name."""
        self._changed = asyncio.Event()
        self.num_waiting = 0

    def set(self, pauses: Sequence[Pause]) -> None:
        """What holds from now on."""
        self.models = {pause.model: pause for pause in pauses}
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_over(self, model: str, time_left_s: float) -> None:
        """Returns once a new request for a paused model may go on.

        Raises `ModelPausedError` where it is refused, `DeadlineExceededError` after `time_left_s`, `QueueFullError`.
        """
        if self.num_waiting >= self._max_waiting and not self.models[model].refuses:
            told = f"model {model!r} is paused, and {self.num_waiting} requests wait already (limits.max_queued)"
            raise QueueFullError(told, RETRY_S)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(time_left_s):
                await self._until_over(model)
        except TimeoutError:
            raise DeadlineExceededError(f"time was up while model {model!r} was paused by its operators") from None
        finally:
            self.num_waiting -= 1

    async def _until_over(self, model: str) -> None:
        while (pause := self.models.get(model)) is not None:
            if pause.refuses:
                raise ModelPausedError(model, RETRY_S)
            await self._changed.wait()
