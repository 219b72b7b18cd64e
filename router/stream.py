"""The output of one request on its way to one reader.

What the reader has not fetched yet is merged into one delivery, so a slow reader holds up nobody, and what is kept for
it is bounded by what the request may produce at all.
"""

import asyncio
from collections.abc import Callable

from router.events import Deliver
from worker.errors import HoldfastError


class OutputStream:
    """Filled by `push` and `fail` without waiting; read by one task.

    Iterating gives deliveries up to the one with a finish reason, and raises what `fail` was given.
    """

    def __init__(self, request_id: str, model: str) -> None:
        self.request_id = request_id
        self.model = model
        self._pending: list[Deliver] = []
        self._error: HoldfastError | None = None
        self._is_read = False
        self._news = asyncio.Event()

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> Deliver:
        if self._is_read:
            raise StopAsyncIteration
        await self._wait_until(lambda: bool(self._pending))
        return self._take()

    async def whole(self) -> Deliver:
        """All of the output in one delivery. Raises what `fail` was given."""
        await self._wait_until(lambda: bool(self._pending) and self._pending[-1].finish_reason is not None)
        return self._take()

    def push(self, delivery: Deliver) -> None:
        self._pending.append(delivery)
        self._news.set()

    def fail(self, error: HoldfastError) -> None:
        """The last word: raised to the reader after what was pushed before."""
        self._error = error
        self._news.set()

    async def _wait_until(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            if self._error is not None:
                raise self._error.with_traceback(None)  # one error may end many streams
            await self._news.wait()
            self._news.clear()

    def _take(self) -> Deliver:
        pending, self._pending = self._pending, []
        self._is_read = pending[-1].finish_reason is not None
        return pending[0] if len(pending) == 1 else _merged(pending)


def _merged(deliveries: list[Deliver]) -> Deliver:
    first, last = deliveries[0], deliveries[-1]
    return Deliver(
        request_id=first.request_id,
        first_token_index=first.first_token_index,
        token_ids=tuple(token_id for delivery in deliveries for token_id in delivery.token_ids),
        text="".join(delivery.text for delivery in deliveries),
        finish_reason=last.finish_reason,
        usage=last.usage,
        logprobs=tuple(item for delivery in deliveries for item in delivery.logprobs),
        fingerprint=last.fingerprint,
        identity_guaranteed=last.identity_guaranteed,
    )
