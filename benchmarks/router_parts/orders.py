"""Child's end of one measured process: the loop that takes orders (see `part.py`)."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import uvloop

CarryOut: TypeAlias = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def say(**news: object) -> None:
    print(json.dumps(news), flush=True)


async def take_orders(carry_out: CarryOut) -> None:
    """Carries out orders, one after the other, until there are no more."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        say(**await carry_out(json.loads(line)))


async def until_the_end() -> None:
    """For parts that take no orders."""
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def run(main: Awaitable[None]) -> None:
    """On uvloop, where Ray Serve runs routers and replicas."""

    async def run_it() -> None:
        await main

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_it())
