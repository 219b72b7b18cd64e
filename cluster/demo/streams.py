"""Concurrent streams of several prompts over gRPC, with the arrival time of each token."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.router.generation import OutputDelta
from holdfast.worker.sampling_params import SamplingParams


@dataclass(slots=True)
class Stream:
    """One prompt's completion as it comes, and when each token came."""

    number: int
    prompt: str
    started_s: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    is_finished: bool = False

    def take(self, chunk: OutputDelta, now_s: float) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.is_finished = chunk.finish_reason is not None
        self.token_times_s += [now_s] * len(chunk.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def first_token_s(self) -> float:
        return self.token_times_s[0] - self.started_s

    @property
    def per_token_s(self) -> float:
        """Mean time from one token to the next."""
        return (self.token_times_s[-1] - self.token_times_s[0]) / max(1, self.num_tokens - 1)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / (self.token_times_s[-1] - self.started_s)

    def is_same_as(self, other: "Stream") -> bool:
        """Whether both have come to the same tokens and text."""
        return self.token_ids == other.token_ids and self.text == other.text

    def longest_pause_s(self, since_s: float) -> float | None:
        """Between two tokens, the second of which came after `since_s`; None if there was no such token."""
        times_s = self.token_times_s
        return max((after - before for before, after in pairwise(times_s) if after > since_s), default=None)


def are_under_way(streams: Sequence[Stream], num_tokens: int) -> bool:
    """Whether each stream has this number of tokens, or has ended."""
    return all(stream.is_finished or stream.num_tokens >= num_tokens for stream in streams)


def are_the_same(streams: Sequence[Stream], expected: Sequence[Stream]) -> bool:
    """Whether every stream is as the one of the same number of the undisturbed run."""
    return all(stream.is_same_as(other) for stream, other in zip(streams, expected, strict=True))


Show = Callable[[Sequence[Stream], Stream], None]
"""Called as `show(streams, grown)` after every chunk."""


async def stream_all(
    routers: Sequence[str], prompts: Sequence[str], params: SamplingParams, show: Show
) -> list[Stream]:
    """Streams all prompts at the same time, from one of the routers as long as it lives."""
    streams = [Stream(number, prompt) for number, prompt in enumerate(prompts, 1)]

    async def follow(client: AsyncClient, stream: Stream) -> None:
        stream.started_s = time.perf_counter()
        async for chunk in client.stream(stream.prompt, params):
            stream.take(chunk, time.perf_counter())
            show(streams, stream)

    async with AsyncClient(routers) as client:
        await asyncio.gather(*(follow(client, stream) for stream in streams))
    return streams


_LINE_TOKENS: Final = 12
"""Tokens per line without a terminal."""


@contextmanager
def display(console: Console) -> Iterator[Show]:
    """All streams growing side by side on a terminal; elsewhere, lines with the number of the stream."""
    if not console.is_terminal:
        yield LinePrinter(console).show
        return
    with Live(console=console, refresh_per_second=20, redirect_stdout=False) as live:
        yield lambda streams, _: live.update(_panes(streams))


class LinePrinter:
    """Prints a stream's text by the line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_shown: dict[int, int] = {}

    def show(self, streams: Sequence[Stream], grown: Stream) -> None:
        num_new = grown.num_tokens - self._num_shown.get(grown.number, 0)
        if num_new >= _LINE_TOKENS or grown.is_finished:
            self._num_shown[grown.number] = grown.num_tokens
            text = " ".join(f"{grown.prompt}{grown.text}".split())
            line = f"[{grown.number}] {grown.num_tokens:3d} tokens: {text}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _panes(streams: Sequence[Stream]) -> Table:
    table = Table.grid(padding=(0, 1))
    for stream in streams:
        table.add_row(
            Text(f"{stream.number}", style="bold cyan"), Text(stream.prompt) + Text(stream.text, style="green")
        )
    return table


def figures(streams: Sequence[Stream]) -> Table:
    """Table of the streams' times and speeds."""
    table = Table("stream", "prompt", "tokens", "first token", "per token", "tokens/s", title="over gRPC, all at once")
    for stream in streams:
        table.add_row(
            str(stream.number),
            stream.prompt,
            str(stream.num_tokens),
            f"{1000 * stream.first_token_s:.0f} ms",
            f"{1000 * stream.per_token_s:.1f} ms",
            f"{stream.tokens_per_s:.0f}",
        )
    return table
