"""The event loops that tests run on: uvloop's, where Ray Serve runs routers and replicas, and asyncio's own.

They differ in what asyncio leaves open, such as how fine their clocks are and what `call_at` returns, so whatever runs
on a loop is tested on the one that serves, and on asyncio's where that costs little.
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import pytest
import uvloop

SERVING: Final = "uvloop"
"""The loop that serves."""

LOOPS: Final[Mapping[str, Callable[[], asyncio.AbstractEventLoop]]] = MappingProxyType(
    {SERVING: uvloop.new_event_loop, "asyncio": asyncio.SelectorEventLoop}
)

TIMEOUT_S: Final = 60

T = TypeVar("T")


def runner(name: str = SERVING) -> asyncio.Runner:
    """As `asyncio.Runner`, on a loop of that kind."""
    return asyncio.Runner(loop_factory=LOOPS[name])


def run(main: Awaitable[T], name: str = SERVING, timeout_s: float | None = TIMEOUT_S) -> T:
    """As `asyncio.run`, on a loop of that kind, and not for ever."""

    async def in_time() -> T:
        async with asyncio.timeout(timeout_s):
            return await main

    with runner(name) as loops:
        return loops.run(in_time())


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a coroutine test to its end on a new loop, of the kind that serves."""

    @functools.wraps(test)
    def runs(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return runs


def on_each_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The same once on each kind of loop: every day on the one that serves, on asyncio's in long runs."""
    return _on_loops(test, [SERVING, pytest.param("asyncio", marks=pytest.mark.slow)])


def on_any_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The same for what runs on the loops of others, as clients do: every day on each kind."""
    return _on_loops(test, LOOPS)


def _on_loops(test: Callable[..., Awaitable[None]], names: Iterable[Any]) -> Callable[..., None]:

    @functools.wraps(test)
    def runs(*args: Any, loop_name: str, **kwargs: Any) -> None:
        run(test(*args, **kwargs), loop_name)

    signature = inspect.signature(test)
    named = inspect.Parameter("loop_name", inspect.Parameter.KEYWORD_ONLY)
    runs.__signature__ = signature.replace(parameters=[*signature.parameters.values(), named])  # type: ignore[attr-defined]
    return pytest.mark.parametrize("loop_name", names)(runs)
