"""The demo: a local cluster, and four prompts streamed at once over gRPC, with their tokens shown as they come.

`make demo`, `holdfast demo` and `python -m cluster.demo.run` are the same. What may not live here: anything that only
the demo could do.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.client import AsyncClient
from cluster.config import ClusterConfig, HoldfastConfig
from cluster.generation import Chunk
from cluster.progress import progress
from cluster.serving import serving
from worker.config import ParallelConfig
from worker.sampling_params import SamplingParams

PROMPTS: Final = ("The capital of France is", "The months of the year are", "The alphabet:", "Once upon a time")
PARAMS: Final = SamplingParams(temperature=0.0, max_tokens=96)

_LINE_TOKENS: Final = 12
"""Without a terminal, so many tokens make a line."""


@dataclass(slots=True)
class Stream:
    """One prompt's completion as it comes, and when each token came."""

    number: int
    prompt: str
    started_s: float = 0.0
    text: str = ""
    token_times_s: list[float] = field(default_factory=list)
    is_finished: bool = False

    def take(self, chunk: Chunk, now_s: float) -> None:
        self.text += chunk.text
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


Show = Callable[[Sequence[Stream], Stream], None]
"""Called as `show(streams, grown)` after every chunk."""


def main() -> int:
    """Runs the demo. Raises what `serving` and the client raise."""
    started_s = time.monotonic()
    config = HoldfastConfig(cluster=ClusterConfig(replicas=2, port=0), parallel=ParallelConfig(tensor_parallel_size=2))
    console = Console()
    with ExitStack() as stack:
        with progress(sys.stderr) as report:
            cluster = stack.enter_context(serving(config, report))
        addresses = " and ".join(cluster.routers)
        console.print(f"up after {time.monotonic() - started_s:.1f} s, gRPC on {addresses}\n", highlight=False)
        with _display(console) as show:
            streams = asyncio.run(stream_all(cluster.routers, PROMPTS, PARAMS, show))
        console.print(_figures(streams))
    console.print(f"stopped; {time.monotonic() - started_s:.1f} s in all", highlight=False)
    return 0


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


@contextmanager
def _display(console: Console) -> Iterator[Show]:
    """All streams growing side by side on a terminal; elsewhere, lines with the number of the stream."""
    if not console.is_terminal:
        yield LinePrinter(console).show
        return
    with Live(console=console, refresh_per_second=20) as live:
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


def _figures(streams: Sequence[Stream]) -> Table:
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


if __name__ == "__main__":
    sys.exit(main())
