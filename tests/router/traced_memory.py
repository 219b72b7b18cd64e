"""Memory that requests leave behind, without the garbage collector."""

import asyncio
import gc
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator

import pytest

NUM_CALLS = 12
"""Each call also leaves 8 kB of its connection, in cycles, to the collector; all together less than two requests."""


@pytest.fixture
def traced() -> Iterator[None]:
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


async def check_freed(call: Callable[[], Awaitable[object]], num_bytes: int) -> None:
    """After many calls that hold `num_bytes` each, fewer than those of three are left."""
    for _ in range(3):  # what the first calls make stays
        await call()
    await asyncio.sleep(0)
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(NUM_CALLS):
        await call()
    for _ in range(2000):  # the last calls may still end on other threads, late on a busy machine
        kept = tracemalloc.get_traced_memory()[0] - before
        if kept < 3 * num_bytes:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"what calls held outlives them: {kept} bytes")
