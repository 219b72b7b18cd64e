"""Bidirectional stream of many requests that run at the same time: whose answer is ready is written.

What may live here: the tasks of one stream, and how many there may be. What may not: what requests and answers are.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing
from typing import TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")


async def interleaved(
    requests: AsyncIterable[Request], answers: Callable[[Request], AsyncGenerator[Answer, None]], most_open: int
) -> AsyncGenerator[Answer, None]:
    """The answers to all requests, as they come. Ends when the requests have ended and all are answered.

    While `most_open` requests are open, no further one is read. An answer that is not read holds up the requests that
    have one as well, and no memory grows. Closing the generator closes all of `answers`, which must not raise.
    """
    outbox: asyncio.Queue[Answer | None] = asyncio.Queue(maxsize=1)
    room = asyncio.Semaphore(most_open)

    async def answer(request: Request) -> None:
        try:
            async with aclosing(answers(request)) as found:
                async for item in found:
                    await outbox.put(item)
        finally:
            room.release()

    async def read() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await room.acquire()
                    tasks.create_task(answer(request))
        finally:
            if not is_closing:
                await outbox.put(None)

    is_closing = False
    reading = asyncio.create_task(read(), name="requests of a stream")
    try:
        while (item := await outbox.get()) is not None:
            yield item
        await reading
    finally:
        is_closing = True
        reading.cancel()
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.exception()  # it was raised above, or nobody is left to hear it
